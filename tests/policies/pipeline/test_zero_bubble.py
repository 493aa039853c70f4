"""Zero bubble: golden lists, and the idle times and peaks of its paper."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.check import check_order
from phalanx.errors import JobError, PlanError
from phalanx.policies.pipeline.zero_bubble import ZeroBubble
from phalanx.registry import build
from phalanx.worlds.pipeline_arrays import play
from tests.order_strategies import as_text, simulate

GOLDEN = {
    (1, 2, 3): [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ],
    (2, 2, 3): [
        "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2",
    ],
    (1, 1, 2): ["0F0 0I0 0W0 0F1 0I1 0W1"],
}
depths, ranks = st.integers(1, 2), st.integers(1, 6)


@pytest.mark.parametrize("case", GOLDEN)
def test_lists_written_out(case):
    depth, p, m = case
    order = build("pipeline", {"name": "zero_bubble", "depth": depth})
    assert as_text(order.order(p, m)) == GOLDEN[case]


@given(depths, ranks, st.integers(1, 13))
def test_each_pass_comes_once_and_after_its_inputs(depth, p, m):
    check_order(ZeroBubble(depth=depth).order(p, m), p, m, tuple(range(p)))


@given(ranks, st.integers(0, 9), st.integers(0, 4), st.integers(0, 4), st.integers(0, 4))
def test_weight_gradients_shorten_the_idle_time_of_depth_1(p, more, t_w, longer, t_i):
    """(p - 1)(t_f + t_i - t_w) where a weight gradient is the shortest of the three."""
    t_f, t_i, m = t_w + longer, t_w + t_i, p + more
    step = play(ZeroBubble().order(p, m), t_f, t_f + t_i, 0.0, t_w, input_s=t_i)
    assert step.step_s[0] == m * (t_f + t_i + t_w) + (p - 1) * (t_f + t_i - t_w)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_equal_passes_idle_as_in_the_papers_table(p):
    """3 (p - 1) for 1F1B, p - 1 for ZB-H1; in ZB-H2 no rank idles once it has begun."""
    m = 3 * p
    one = play(build("pipeline", "1f1b").order(p, m), 1.0, 2.0).step_s[0]
    h1 = play(ZeroBubble(depth=1).order(p, m), 1.0, 2.0, 0.0, 1.0, input_s=1.0).step_s[0]
    assert (one - 3 * m, h1 - 3 * m) == (3 * (p - 1), p - 1)
    h2 = play(ZeroBubble(depth=2).order(p, m), 1.0, 2.0, 0.0, 1.0, input_s=1.0)
    for rank in range(p):
        own = [at for at, row in enumerate(h2.wired.rows) if row.rank == rank]
        assert h2.start_s[own].min() == rank
        assert h2.end_s[own].max() == rank + 3 * m, "begins r later, ends r later, idles never"


@given(depths, ranks, st.integers(1, 15))
def test_every_rank_keeps_as_much_as_rank_0(depth, p, m):
    peaks = play(ZeroBubble(depth=depth).order(p, m), 1, 2, 0, 1).peak_in_flight
    assert peaks.tolist() == [min(m, depth * p - (depth - 1))] * p


def test_the_simulated_world_agrees_on_time_and_memory():
    step_s, peaks = simulate(ZeroBubble(), 4, 8, {"F": 1, "I": 1, "W": 1})
    assert step_s == 8 * 3 + 3
    assert peaks == [4] * 4


def test_refuses_sizes_and_depths_without_a_schedule():
    with pytest.raises(PlanError, match="at least 1"):
        ZeroBubble().order(0, 4)
    with pytest.raises(JobError, match="depth = 3: must be at most 2"):
        build("pipeline", {"name": "zero_bubble", "depth": 3})
