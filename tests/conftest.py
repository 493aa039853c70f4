"""Ends the worker processes of `tests.ranks` with the session."""

from __future__ import annotations

from tests.ranks import close_pool


def pytest_sessionfinish() -> None:
    close_pool()
