"""What tests of commands share."""

from __future__ import annotations

import pytest

from phalanx.engines import calibrate, launch


@pytest.fixture
def no_process(monkeypatch, tmp_path):
    """A cache of its own, and no process at all."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def started(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(launch, "_Rank", started)
    monkeypatch.setattr(calibrate, "launch_local", started)
