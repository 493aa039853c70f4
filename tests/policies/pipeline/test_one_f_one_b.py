"""1F1B: golden lists, and the laws of its docstring."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.check import check_order
from phalanx.errors import PlanError
from phalanx.policies.pipeline.one_f_one_b import OneFOneB
from phalanx.registry import build
from tests.order_strategies import as_text, simulate, sizes

GOLDEN = {
    (2, 3): ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"],
    (3, 1): ["0F0 0B0", "1F0 1B0", "2F0 2B0"],
    (3, 4): [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ],
    (4, 2): ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B0 2B1", "3F0 3B0 3F1 3B1"],
}


@pytest.mark.parametrize("size", GOLDEN)
def test_lists_written_out(size):
    assert as_text(build("pipeline", "1f1b").order(*size)) == GOLDEN[size]


@given(sizes)
def test_each_pass_comes_once_and_after_its_inputs(size):
    p, m = size
    check_order(OneFOneB().order(p, m), p, m, OneFOneB().rank_of_stage(p))


@given(sizes, st.integers(1, 5), st.integers(1, 5))
def test_idle_time_is_p_minus_1_passes(size, t_f, t_b):
    p, m = size
    step_s, _ = simulate(OneFOneB(), p, m, {"F": t_f, "B": t_b})
    assert step_s == (m + p - 1) * (t_f + t_b)


@given(sizes)
def test_rank_r_keeps_min_of_m_and_p_minus_r_micro_batches(size):
    p, m = size
    _, peaks = simulate(OneFOneB(), p, m, {"F": 1, "B": 2})
    assert peaks == [min(m, p - r) for r in range(p)]


@pytest.mark.parametrize("size", [(0, 4), (2, 0)])
def test_refuses_sizes_without_a_schedule(size):
    with pytest.raises(PlanError, match="at least 1") as caught:
        OneFOneB().order(*size)
    assert caught.value.code == "order/illegal"


def test_a_plan_asks_for_a_micro_batch_for_each_rank_where_ranks_take_turns():
    wanted = {
        "gpipe": 1, "1f1b": 4, "interleaved": 4, "zero_bubble": 4, "zbv": 4, "hanayo": 4,
        "dualpipe_v": 8,
    }  # fmt: skip
    assert {name: build("pipeline", name).wanted_items(4) for name in wanted} == wanted
    short = build("pipeline", {"name": "interleaved", "per_round": 3})
    assert short.wanted_items(4) == 1, "all forward passes come first"
    rows = ("0F0,0F1,0F2,0B0,0B1,0B2", "1F0,1B0,1F1,1B1,1F2,1B2")
    listed = build("pipeline", {"name": "listed", "rows": rows})
    assert (listed.wanted_items(2), listed.least_items(2), listed.most_items(2)) == (2, 3, 3)
