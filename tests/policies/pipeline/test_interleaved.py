"""Interleaved 1F1B: golden lists, the laws of its docstring, published bubbles and peaks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.check import check_order
from phalanx.errors import JobError, PlanError
from phalanx.policies.pipeline.interleaved import Interleaved
from phalanx.registry import build
from phalanx.worlds.pipeline_arrays import play
from tests.order_strategies import as_text, simulate

GOLDEN = {
    # one rank of two chunks: the first chunk's items, then the second's; backward in reverse
    (1, 2, 2, 0): ["0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1"],
    (2, 2, 2, 0): [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ],
    # three items on two ranks: a round of two would leave one item alone, so one round takes all
    (2, 2, 3, 0): [
        "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2",
        "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2",
    ],
    # a round shorter than the pipeline: all forward passes come first
    (2, 2, 2, 1): [
        "0F0 2F0 0F1 2F1 2B0 0B0 2B1 0B1",
        "1F0 3F0 1F1 3F1 3B0 1B0 3B1 1B1",
    ],
}
cases = st.tuples(
    st.integers(1, 5), st.integers(1, 3), st.integers(1, 13), st.integers(0, 8)
)  # p, v, m, per_round


def bubble(p: int, v: int, m: int, per_round: int = 0, p2p_s: float = 0.0) -> float:
    order = Interleaved(virtual=v, per_round=per_round)
    return play(order.order(p, m), 1.0, 2.0, p2p_s).bubble_frac


@pytest.mark.parametrize("case", GOLDEN)
def test_lists_written_out(case):
    p, v, m, per_round = case
    order = build("pipeline", {"name": "interleaved", "virtual": v, "per_round": per_round})
    assert as_text(order.order(p, m)) == GOLDEN[case]


@given(cases)
def test_each_pass_comes_once_and_after_its_inputs(case):
    p, v, m, per_round = case
    order = Interleaved(virtual=v, per_round=per_round)
    check_order(order.order(p, m), order.num_stages(p), m, order.rank_of_stage(p))


@given(cases)
def test_warm_up_and_peak_are_those_of_the_docstring(case):
    p, v, m, per_round = case
    order = Interleaved(virtual=v, per_round=per_round)
    lists = order.order(p, m)
    longest = max(len(items) for items in order.rounds(p, m))
    peaks = play(lists, 1, 2).peak_in_flight
    for rank, steps in enumerate(lists):
        warmup = [step.kind for step in steps].index("B") - 1
        if 0 < per_round < p:
            assert warmup == m * v - 1
            assert peaks[rank] == m * v
        else:
            expected = (v - 1) * longest + 2 * (p - rank - 1)
            assert warmup == min(m * v - 1, expected)
            assert peaks[rank] == min(m * v, expected + 1)


@given(cases)
def test_rounds_hold_every_item_once_in_order(case):
    p, v, m, per_round = case
    rounds = Interleaved(virtual=v, per_round=per_round).rounds(p, m)
    assert [item for items in rounds for item in items] == list(range(m))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 12), st.integers(0, 5))
def test_idle_time_is_p_minus_1_over_m_v_for_any_number_of_items(p, v, more, longer):
    m = p + more
    assert bubble(p, v, m, p + longer) == pytest.approx((p - 1) / (m * v))


def test_the_simulated_world_agrees_on_time_and_memory():
    step_s, peaks = simulate(Interleaved(virtual=3), 4, 9, {"F": 1, "B": 2})
    assert step_s == 9 * 3 * 3 + 3 * 3
    longest = 5  # 9 items on 4 ranks are rounds of 5 and 4
    assert peaks == [2 * longest + 2 * (4 - rank - 1) + 1 for rank in range(4)]


def test_bubbles_of_llama_3_are_those_published():
    """pp 16, 8 chunks: the paper reports 12 % at 16 micro-batches and 5 % at 32."""
    assert bubble(16, 8, 16) == pytest.approx(0.1172, abs=1e-4)
    assert bubble(16, 8, 32) == pytest.approx(0.0586, abs=1e-4)


def test_a_longer_round_hides_messages_and_keeps_more_chunks():
    """pp 4, 7 chunks, 12 micro-batches, a message half as long as a forward pass: the order of
    Figure 9 of the Llama 3 paper (idle 1f1b > flexible >= all-forward, memory the other way)."""
    idle = [bubble(4, 7, 12, per_round, p2p_s=0.5) for per_round in (4, 6, 12)]
    assert idle == pytest.approx([12 / 84, 4 / 84, 4 / 84])
    assert [bubble(4, 7, 12, per_round) for per_round in (4, 6, 12)] == pytest.approx([3 / 84] * 3)
    peaks = [
        play(Interleaved(virtual=7, per_round=n).order(4, 12), 1, 2).peak_in_flight[0]
        for n in (4, 6, 12, 3)
    ]
    assert peaks == [31, 43, 79, 84]


def test_a_round_shorter_than_the_pipeline_leaves_ranks_idle():
    assert bubble(4, 7, 12, 3) == pytest.approx(0.32, abs=0.005)


@pytest.mark.parametrize("size", [(0, 4), (2, 0)])
def test_refuses_sizes_without_a_schedule(size):
    with pytest.raises(PlanError, match="at least 1") as caught:
        Interleaved().order(*size)
    assert caught.value.code == "order/illegal"


@pytest.mark.parametrize("options", [{"virtual": 0}, {"per_round": -1}, {"virtual": 1.5}])
def test_refuses_options_without_a_meaning(options):
    with pytest.raises(JobError) as caught:
        build("pipeline", {"name": "interleaved"} | options)
    assert next(iter(options)) in str(caught.value)
    if isinstance(next(iter(options.values())), int):
        with pytest.raises(PlanError, match="at least"):
            Interleaved(**options).order(2, 2)
