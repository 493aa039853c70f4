"""A pipeline's plan refuses what could not run, before any process starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.policy import Step
from tests.order_strategies import Drawn, orders, random_order
from tests.toy_pipeline import toy_plan

TOKENS = (3, 1, 4)
cells = st.tuples(st.integers(0, 99), st.integers(0, 99))


def plan(lists, rank_of_stage=(0, 1)):
    return toy_plan(lists, rank_of_stage, TOKENS)


def refusal(lists, rank_of_stage=(0, 1), tokens=TOKENS) -> PlanError:
    with pytest.raises(PlanError) as caught:
        toy_plan(lists, rank_of_stage, tokens)
    return caught.value


@given(orders(), cells)
def test_any_legal_order_without_one_step_is_refused(drawn: Drawn, cell):
    lists, rank_of_stage, num_items = drawn
    steps = lists[cell[0] % len(lists)]
    dropped = steps.pop(cell[1] % len(steps))
    assume(any(step.kind != "F" for each in lists for step in each))
    error = refusal(lists, rank_of_stage, range(1, num_items + 1))
    assert error.code == "order/missing" and str(dropped) in str(error)


@given(orders(), cells, st.integers(0, 99))
def test_any_legal_order_with_a_step_twice_is_refused(drawn: Drawn, cell, where):
    lists, rank_of_stage, num_items = drawn
    steps = lists[cell[0] % len(lists)]
    doubled = steps[cell[1] % len(steps)]
    steps.insert(where % (len(steps) + 1), doubled)
    error = refusal(lists, rank_of_stage, range(1, num_items + 1))
    assert error.code == "order/doubled" and f"= {doubled}: comes twice" in str(error)


def test_lists_that_wait_for_one_another_are_refused_with_the_grid():
    lists = [
        [Step(0, "F", 0), Step(0, "B", 0), Step(0, "F", 1), Step(0, "B", 1)],
        [Step(1, "F", 1), Step(1, "B", 1), Step(1, "F", 0), Step(1, "B", 0)],
    ]
    error = refusal(lists, tokens=TOKENS[:2])
    assert error.code == "check/deadlock"
    assert "[0B0]" in error.detail and "[1F1]" in error.detail


def test_a_rank_without_a_stage_is_refused():
    error = refusal(random_order((0, 1), 3, 0), (0, 0))
    assert error.code == "order/illegal" and "each of the 2 ranks" in str(error)


def test_lists_without_backward_passes_are_refused():
    error = refusal([[Step(stage, "F", item) for item in range(3)] for stage in (0, 1)])
    assert error.code == "order/missing" and "needs backward passes" in str(error)


def test_shapes_name_each_stage_and_micro_batch():
    good = plan(random_order((0, 1), 3, 0))
    for outputs in (good.shapes.outputs[:1], [good.shapes.outputs[0], [(3, 6)]]):
        with pytest.raises(PlanError, match="output of each stage for each micro-batch") as caught:
            replace(good, shapes=replace(good.shapes, outputs=outputs))
        assert caught.value.code == "order/illegal"


def test_stages_of_a_rank_come_in_model_order():
    folded = plan(random_order((0, 1, 1, 0), 3, 0), (0, 1, 1, 0))
    assert [folded.stages_of(rank) for rank in (0, 1)] == [[0, 3], [1, 2]]
    assert folded.num_stages == 4 and folded.num_items == 3
