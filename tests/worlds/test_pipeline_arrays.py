"""Pipelines as arrays have the times of the event world."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.action import Collective, Compute, Move, Send
from phalanx.drive import drive
from phalanx.errors import CheckError, PlanError
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.policies.pipeline.interleaved import Interleaved
from phalanx.policy import Step
from phalanx.registry import build
from phalanx.workload import toy_work
from phalanx.worlds.pipeline_arrays import play, wire
from phalanx.worlds.sim import SimWorld
from tests.order_strategies import FixedOrder, orders


class DrawnCost:
    """Whole seconds for every pass and message, by kind, stage and item."""

    def __init__(self, num_stages: int, num_items: int, seed: int) -> None:
        draw = random.Random(seed)
        self.seconds = {
            kind: np.array(
                [[draw.randint(0, 9) for _ in range(num_items)] for _ in range(num_stages)]
            )
            for kind in ("F", "B", "I", "W", "send")
        }

    def compute_s(self, action: Compute, rank: int) -> float:
        if action.op == "optimizer":
            return 0.0
        return float(self.seconds[action.phase][action.stage, action.item])

    def transfer_s(self, action: Send, source: int, target: int) -> float:
        stage, item = map(int, action.tensor.partition(":")[2].split("."))
        return float(self.seconds["send"][stage, item])

    def transfer_latency_s(self, action: Send, source: int, target: int) -> float:
        return 0.0

    def collective_s(self, action: Collective, members: Sequence[int]) -> float:
        return 0.0

    def move_s(self, action: Move, rank: int) -> float:
        return 0.0

    def rank_class(self, rank: int) -> int:
        return rank


def compare(lists, placement, num_items: int, seed: int) -> None:
    """Every pass starts and ends when it does in the event world."""
    cost = DrawnCost(len(placement), num_items, seed)
    mesh = Mesh(pp=len(lists))
    work = toy_work(len(placement), [1] * num_items)
    program = lower(work, mesh, FixedOrder(lists, tuple(placement)), grain="stage")
    trace = drive(SimWorld(mesh, cost), program=program)
    starts = {row["action_id"]: row["start_s"] for row in trace.rows()}
    played = play(lists, *(cost.seconds[kind] for kind in ("F", "B", "send", "W", "I")))
    found = {str(row.step): start for row, start in zip(played.wired.rows, played.start_s[:, 0])}
    assert found == {label: starts[label] for label in found}


@settings(max_examples=40, deadline=None)
@given(orders(), st.integers(0, 2**32))
def test_any_legal_schedule_has_the_times_of_the_event_world(drawn, seed):
    compare(*drawn, seed)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 7), st.integers(0, 5), st.integers(0, 999)
)
def test_interleaved_schedules_have_the_times_of_the_event_world(p, v, m, per_round, seed):
    order = Interleaved(virtual=v, per_round=per_round)
    compare(order.order(p, m), order.rank_of_stage(p), m, seed)


@pytest.mark.parametrize("name", ["zero_bubble", "zbv", "dualpipe_v", "hanayo"])
def test_folded_and_split_schedules_have_the_times_of_the_event_world(name):
    order = build("pipeline", name)
    for p, m in ((1, 3), (2, 5), (3, 7)):
        compare(order.order(p, m), order.rank_of_stage(p), m, seed=p)


def test_an_input_gradient_takes_as_long_as_a_backward_pass_unless_it_is_said():
    lists = build("pipeline", "zero_bubble").order(2, 3)
    assert play(lists, 1, 2, 0, 1).step_s == play(lists, 1, 2, 0, 1, 2).step_s
    assert play(lists, 1, 2, 0, 1, 1).step_s < play(lists, 1, 2, 0, 1).step_s


def test_replicas_are_played_as_each_alone():
    lists = Interleaved(virtual=2).order(3, 5)
    draw = np.random.default_rng(7)
    seconds = draw.integers(1, 9, size=(1, 5, 11)).astype(float)
    together = play(lists, seconds, 2 * seconds, 0.5)
    for at in range(11):
        alone = play(lists, seconds[..., at], 2 * seconds[..., at], 0.5)
        assert alone.step_s[0] == together.step_s[at]


@given(st.integers(1, 4), st.integers(1, 8), st.floats(0.1, 3.0))
def test_a_step_scales_with_its_seconds_and_never_ends_before_its_work(p, m, factor):
    lists = Interleaved(virtual=2).order(p, m)
    once, more = play(lists, 1.0, 2.0, 0.25), play(lists, factor, 2 * factor, 0.25 * factor)
    assert more.step_s[0] == pytest.approx(factor * once.step_s[0])
    assert once.step_s[0] >= once.busy_s.max()
    assert 0.0 <= once.idle_frac < 1.0


def test_lists_that_wait_for_one_another_are_an_error():
    lists = [[Step(0, "B", 0), Step(0, "F", 0)], [Step(1, "F", 0), Step(1, "B", 0)]]
    with pytest.raises(CheckError) as caught:
        wire(lists)
    assert caught.value.code == "check/deadlock"
    assert "0B0" in str(caught.value)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), np.ones((3, 3, 3))])
def test_seconds_that_cannot_be_are_an_error(seconds):
    with pytest.raises(PlanError, match="forward_s"):
        play(Interleaved().order(2, 2), seconds, 1.0)


def test_no_lists_are_an_error():
    with pytest.raises(CheckError, match="at least one pass"):
        wire([[], []])
