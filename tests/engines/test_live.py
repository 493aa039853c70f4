"""The line that shows where a run is."""

from __future__ import annotations

import os

from phalanx.engines.whole import live
from phalanx.engines.whole.live import Progress


def step(number: int, **values):
    known = {"num_steps": 40, "loss": 2.34567, "step_s": 1.5, "counted_tokens_per_s": 812.4}
    return {"kind": "step", "step": number, "memory_bytes": 3 * 2**29} | known | values


def test_a_step_shows_loss_speed_time_left_and_memory():
    said: list[str] = []
    with Progress(said.append, live=False) as progress:
        progress.hear(step(1))
    assert said == ["step 1/40  loss 2.3457  812 counted tokens/s  0:58 left  1.5 GiB per process"]


def test_without_a_terminal_a_line_comes_now_and_then(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(live, "monotonic", lambda: now[0])
    said: list[str] = []
    with Progress(said.append, live=False) as progress:
        for number in range(1, 41):
            now[0] += 1.5
            progress.hear(step(number, step_s=100.0))
    assert [line.split()[1] for line in said] == ["1/40", "12/40", "23/40", "34/40", "40/40"]
    assert "1:48:20 left" not in said[-1] and "1:05:00 left" in said[0]


def test_on_a_terminal_one_line_is_redrawn_and_never_wraps(capsys, monkeypatch):
    monkeypatch.setattr(
        live.shutil, "get_terminal_size", lambda fallback: os.terminal_size((40, 24))
    )
    said: list[str] = []
    with Progress(said.append, live=True) as progress:
        progress.hear(step(1))
        progress.hear(step(2))
        progress.hear({"kind": "evaluate", "step": 2, "loss": 2.0})
    drawn = capsys.readouterr().err
    assert [len(part) for part in drawn.split("\r")] == [0, 39, 40]  # the last ends its line
    assert said == ["held-out loss after step 2: 2.0000"]


def test_other_events_are_lines_of_their_own():
    said: list[str] = []
    with Progress(said.append, live=False) as progress:
        progress.hear({"kind": "checkpoint", "step": 3, "path": "runs/a/checkpoints/step-3"})
        progress.hear({"kind": "warning", "text": "a spike"})
        progress.hear({"kind": "stopped", "reason": "early stop: no better", "step": 9})
        assert not progress.interrupted
        progress.hear({"kind": "stopped", "reason": "signal", "step": 9})
    assert said == [
        "checkpoint after step 3: runs/a/checkpoints/step-3",
        "warning: a spike",
        "stopped after step 9: early stop: no better",
    ]
    assert progress.interrupted["step"] == 9
