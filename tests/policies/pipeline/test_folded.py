"""ZB-V and DualPipeV: torch's own lists, and the idle times and peaks of their papers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

from phalanx.check import check_order
from phalanx.errors import PlanError
from phalanx.policies.pipeline.dualpipe_v import DualPipeV
from phalanx.policies.pipeline.zbv import ZBV
from phalanx.policy import Order
from phalanx.registry import build
from phalanx.worlds.pipeline_arrays import Played, play
from tests.order_strategies import as_text, simulate

TORCHS = {
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipe_v": schedules.ScheduleDualPipeV,
}


def parts(order: Order, p: int, m: int, t_f=1.0, t_i=1.0, t_w=1.0) -> Played:
    return play(order.order(p, m), t_f, t_i + t_w, 0.0, t_w, input_s=t_i)


def torchs_list(name: str, rank: int, p: int, m: int) -> list[str]:
    """What torch's own schedule runs; overlapped pairs one after the other."""
    sizes = SimpleNamespace(pp_group_size=p, num_stages=2 * p, _n_microbatches=m)
    actions = TORCHS[name]._calculate_single_rank_operations(sizes, rank)
    return [str(each) for a in actions if a is not None for each in (a.sub_actions or (a,))]


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (2, 5), (3, 7), (4, 8), (5, 13), (8, 20)])
def test_lists_are_those_of_torchs_schedule(name, p, m):
    lists = build("pipeline", name).order(p, m)
    assert as_text(lists) == [" ".join(torchs_list(name, rank, p, m)) for rank in range(p)]


@given(st.sampled_from(sorted(TORCHS)), st.integers(1, 5), st.integers(1, 13))
def test_each_pass_comes_once_and_after_its_inputs(name, p, m):
    order = build("pipeline", name)
    m = max(m, order.least_items(p))
    check_order(order.order(p, m), order.num_stages(p), m, order.rank_of_stage(p))


@given(st.integers(1, 6), st.integers(0, 9))
def test_zbv_never_idles_once_it_has_begun(p, more):
    m = 2 * p - 1 + more
    step = parts(ZBV(), p, m)
    assert step.step_s[0] == 6 * m + p - 1
    for rank in range(p):
        own = [at for at, row in enumerate(step.wired.rows) if row.rank == rank]
        assert (step.start_s[own].min(), step.end_s[own].max()) == (rank, rank + 6 * m)
    assert step.peak_in_flight.tolist() == [2 * p] * p


@given(st.integers(1, 6), st.integers(0, 9))
def test_dualpipe_v_idles_p_minus_1_forward_passes(p, more):
    m = 2 * p + more
    step = parts(DualPipeV(), p, m)
    assert step.step_s[0] == 6 * m + (p - 1)
    assert step.peak_in_flight.tolist() == [2 * p + 1] * p


def test_the_simulated_world_agrees_on_time_and_memory():
    step_s, peaks = simulate(ZBV(), 3, 7, {"F": 1, "I": 1, "W": 1})
    assert (step_s, peaks) == (6 * 7 + 2, [6] * 3)
    step_s, peaks = simulate(DualPipeV(), 3, 7, {"F": 1, "B": 2, "I": 1, "W": 1})
    assert (step_s, peaks) == (6 * 7 + 2, [7] * 3)


@pytest.mark.parametrize("name", TORCHS)
def test_the_turn_sends_nothing(name):
    order = build("pipeline", name)
    assert order.rank_of_stage(3) == (0, 1, 2, 2, 1, 0)
    wired = play(order.order(3, 6), 1, 1).wired
    assert sum(row.sends for row in wired.rows) == 2 * 2 * 2 * 6


def test_dualpipe_v_refuses_fewer_micro_batches_than_stages():
    assert DualPipeV().least_items(3) == 6
    with pytest.raises(PlanError, match="two micro-batches per rank") as caught:
        DualPipeV().order(3, 5)
    assert caught.value.legal == (6,)


def test_zbv_takes_fewer_micro_batches_than_fill_it():
    step = parts(ZBV(), 4, 3)
    assert len(step.wired.rows) == 8 * 3 * 3
    assert step.step_s[0] > 6 * 3 + 3
