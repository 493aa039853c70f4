"""One set of examples for every machine; what thousands of tests would each pay for."""

from __future__ import annotations

import gc
import os

# Threads that spin at barriers make tests ten times slower where other programs have the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from hypothesis import settings

from tests.ranks import close_pool

# A change is judged by what it changes: every machine draws the same examples. `make soak` looks
# for new ones (HYPOTHESIS_PROFILE=search). Deadlines would measure the machine.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("search", max_examples=500, deadline=None, print_blob=True)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "same")
settings.load_profile(PROFILE)

# Collecting makes a million objects that all live to the end: looked at once, not in every test.
gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Names that two workers agree on; a search draws five times the examples of each test."""
    for item in items:
        params = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(isinstance(p, (set, frozenset)) and str(p) in item.name for p in params):
            where = f"{item.nodeid}: a set in a name prints in another order in each process"
            raise pytest.UsageError(f"{where}; parametrize with a sorted list")
    if PROFILE != "search":
        return
    own = "_hypothesis_internal_use_settings"
    for test in {item.obj for item in items if hasattr(item.obj, own)}:
        asked = getattr(test, own)
        setattr(test, own, settings(asked, max_examples=5 * asked.max_examples))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    close_pool()
