"""What an island keeps of a job that never ends."""

from __future__ import annotations

from phalanx.engines import islands
from tests.engines.test_islands import Summing, run_islands


def test_the_trace_of_a_long_job_holds_its_last_actions(monkeypatch):
    monkeypatch.setattr(islands, "TRACED", 7)
    island = Summing(0)
    (trace,) = run_islands([island])
    assert sorted(island.sums) == [1, 2, 3]
    rows = list(trace.rows())
    assert len(rows) == 7 and rows[-1]["step"] >= 2
    assert all(row["dur_s"] >= 0.0 and row["operator"] for row in rows)
