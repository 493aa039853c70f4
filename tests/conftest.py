"""One set of examples for every machine; the end of the worker processes of `tests.ranks`."""

from __future__ import annotations

import os

# Threads that spin at barriers make tests ten times slower where other programs have the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from hypothesis import settings

from tests.ranks import close_pool

# A change is judged by what it changes: every machine draws the same examples. `make soak` looks
# for new ones (HYPOTHESIS_PROFILE=search). Deadlines would measure the machine.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("search", max_examples=500, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_sessionfinish() -> None:
    close_pool()
