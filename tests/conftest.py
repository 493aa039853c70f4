"""Ends the worker processes of `tests.ranks` with the session."""

from __future__ import annotations

import os

# Threads that spin at barriers make tests ten times slower where other programs have the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from tests.ranks import close_pool


def pytest_sessionfinish() -> None:
    close_pool()
