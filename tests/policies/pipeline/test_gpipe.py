"""GPipe: golden lists, and the laws of its docstring."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.check import check_order
from phalanx.errors import PlanError
from phalanx.policies.pipeline.gpipe import GPipe
from phalanx.registry import build
from tests.order_strategies import as_text, simulate, sizes

GOLDEN = {
    (2, 3): ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"],
    (3, 1): ["0F0 0B0", "1F0 1B0", "2F0 2B0"],
    (4, 2): ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B0 2B1", "3F0 3F1 3B0 3B1"],
}


@pytest.mark.parametrize("size", GOLDEN)
def test_lists_written_out(size):
    assert as_text(build("pipeline", "gpipe").order(*size)) == GOLDEN[size]


@given(sizes)
def test_each_pass_comes_once_and_after_its_inputs(size):
    p, m = size
    check_order(GPipe().order(p, m), p, m, GPipe().rank_of_stage(p))


@given(sizes, st.integers(1, 5), st.integers(1, 5))
def test_idle_time_is_p_minus_1_passes(size, t_f, t_b):
    p, m = size
    step_s, _ = simulate(GPipe(), p, m, {"F": t_f, "B": t_b})
    assert step_s == (m + p - 1) * (t_f + t_b)


@given(sizes)
def test_every_rank_keeps_all_micro_batches(size):
    p, m = size
    _, peaks = simulate(GPipe(), p, m, {"F": 1, "B": 2})
    assert peaks == [m] * p


@pytest.mark.parametrize("size", [(0, 4), (2, 0)])
def test_refuses_sizes_without_a_schedule(size):
    with pytest.raises(PlanError, match="at least 1") as caught:
        GPipe().order(*size)
    assert caught.value.code == "order/illegal"
