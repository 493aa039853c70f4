"""What a run keeps of the spans of its steps, however long it is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from phalanx.engines.metrics import StepTrace, rows_of_rank
from phalanx.engines.trainer_step import Work

PARTS = [Work("F", 0), Work("B", 0), Work("O", -1)]
ROWS = len(PARTS) + 2  # the step itself, and a message


def spans(step: int) -> SimpleNamespace:
    parts = [(work, step + at / 4, step + (at + 1) / 4) for at, work in enumerate(PARTS)]
    message = {"rank": 3, "step": step, "operator": "send", "start_s": step + 0.1, "dur_s": 0.1}
    return SimpleNamespace(parts=lambda _origin_s: parts, action_rows=lambda _origin_s: [message])


@pytest.mark.parametrize("num_steps", [1, 7, 8, 9, 400])
def test_a_long_run_keeps_its_last_steps_whole(num_steps):
    most = 8 * ROWS
    trace = StepTrace(3, "job", most)
    for step in range(num_steps):
        assert trace.add_step(step, spans(step)) == 0.75
    rows = list(trace.build().rows())
    kept = sorted({row["step"] for row in rows})
    assert kept == list(range(num_steps - len(kept), num_steps))
    assert len(rows) == ROWS * len(kept) <= most
    assert len(kept) == num_steps or 2 * len(rows) >= most


@pytest.mark.parametrize("num_ranks", [1, 8, 100, 500, 16_384])
def test_the_rows_of_all_ranks_can_be_joined_by_one_of_them(num_ranks):
    assert 1_000 <= rows_of_rank(num_ranks) <= 100_000
    assert rows_of_rank(num_ranks) == 1_000 or rows_of_rank(num_ranks) * num_ranks <= 500_000
