"""Policies in the simulated world: what they hear, when, and what becomes of their decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from phalanx.action import Action, Collective, Compute, Mark, Program, Timer
from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.errors import CheckError
from phalanx.mesh import Mesh
from phalanx.policy import Event, React, View
from phalanx.worlds.faults import Fault, FaultScript
from phalanx.worlds.sim import SimWorld

COST = TableCost({"a": 1.0, "b": 2.0, "c": 3.0, "all_reduce": 4.0})
Heard = list[tuple[float, str, int, str]]


@dataclass(frozen=True, kw_only=True)
class Scripted(React):
    """Answers a batch of events with what `answer` says; keeps what it heard."""

    answer: Callable[[Sequence[Event], View], list[Action]]
    heard: Heard = field(default_factory=list)

    def start(self, view: View) -> None:
        return None

    def on(self, state: None, events: Sequence[Event], view: View) -> list[Action]:
        self.heard.extend((e.time_s, e.kind, e.rank, e.label) for e in events)
        assert all(view.now_s == e.time_s for e in events), "one batch, one moment"
        return self.answer(events, view)


def at_start(*actions: Action) -> Callable[[Sequence[Event], View], list[Action]]:
    return lambda events, view: list(actions) if events[0].kind == "start" else []


def test_events_of_one_moment_come_in_one_batch():
    batches = []

    def answer(events, view):
        batches.append([(e.kind, e.rank) for e in events])
        return at_start(Compute(op="a", label="x"), Timer(delay_s=1.0, ranks=(1,)))(events, view)

    drive(SimWorld(Mesh(dp=2), COST), reacts=[Scripted(answer=answer)])
    assert batches == [[("start", -1)], [("done", 0), ("done", 1), ("timer", 1)]]


def test_only_labelled_decisions_are_reported():
    policy = Scripted(
        answer=at_start(Compute(op="a", label="x"), Compute(op="b"), Compute(op="a", label="y"))
    )
    world = SimWorld(Mesh(dp=1), COST)
    program = Program.alike(world.mesh, [Compute(op="c", label="planned")])
    trace = drive(world, program=program, reacts=[policy])
    assert policy.heard == [
        *((0.0, "start", -1, ""), (3.0, "step", 0, "")),
        *((4.0, "done", 0, "x"), (7.0, "done", 0, "y")),
    ], "decisions queue behind the planned action of their lane"
    assert trace.history() == [*((0.0, 0, "planned"), (3.0, 0, "x"), (4.0, 0, "b"), (6.0, 0, "y"))]


def test_ranks_say_who_carries_out_a_decision():
    policy = Scripted(
        answer=at_start(
            Compute(op="a", label="one", ranks=(2,)),
            Compute(op="a", label="all"),
            Collective(collective="all_reduce", axis="g", members=(0, 2), label="two"),
        )
    )
    trace = drive(SimWorld(Mesh(dp=3), COST), reacts=[policy])
    assert trace.history(rank=2) == [(0.0, 2, "one"), (1.0, 2, "all"), (2.0, 2, "two")]
    assert trace.history(rank=0) == [(0.0, 0, "all"), (2.0, 0, "two")]
    assert trace.history(rank=1) == [(0.0, 1, "all")]
    assert trace.where(operator="all_reduce").columns["wire_bytes"].tolist() == [0.0, 0.0]


def test_after_finds_the_latest_action_of_a_label():
    def answer(events, view):
        first = [e for e in events if e.kind == "start"]
        if first:
            return [Compute(op="a", label="x"), Compute(op="c", label="slow", lane="other")]
        if events[0].label == "x" and events[0].time_s == 1.0:
            again = Compute(op="b", label="x", lane="new")
            return [again, Compute(op="a", label="end", lane="third", after=("x", "slow"))]
        return []

    policy = Scripted(answer=answer)
    drive(SimWorld(Mesh(dp=1), COST), reacts=[policy])
    assert (4.0, "done", 0, "end") in policy.heard, "3 s of slow and of the second x, then 1 s"


def test_labels_of_decisions_do_not_leak_into_programs():
    """Ranks share a compiled list; what one of them decides later has no place in it."""
    policy = Scripted(answer=at_start(Compute(op="a", label="mine", ranks=(0,))))
    world = SimWorld(Mesh(dp=2), COST)
    program = Program.alike(world.mesh, [Compute(op="c", label="planned")])
    world.load(program)
    world.next_events()
    world.issue(policy.answer([Event(kind="start", time_s=0.0)], world.view("job")))
    world.issue([Compute(op="b", label="x", lane="y", after=("planned",))])
    with pytest.raises(CheckError):
        world.issue([Compute(op="b", after=("mine",), ranks=(1,))])


def test_an_unknown_label_is_named_with_near_ones():
    policy = Scripted(
        answer=at_start(Compute(op="a", label="grad"), Compute(op="a", after=("gard",)))
    )
    with pytest.raises(CheckError) as caught:
        drive(SimWorld(Mesh(dp=1), COST), reacts=[policy])
    assert caught.value.code == "check/label"


def test_posted_events_arrive_at_their_time():
    policy = Scripted(answer=lambda events, view: [])
    world = SimWorld(Mesh(dp=1), COST)
    world.post(Event(kind="arrive", time_s=2.5, item=7), Event(kind="arrive", time_s=1.0, item=8))
    drive(world, reacts=[policy])
    assert [(t, kind) for t, kind, *_ in policy.heard] == [
        *((0.0, "start"), (1.0, "arrive"), (2.5, "arrive"))
    ]


def test_outcomes_replace_what_is_heard_of_an_operator():
    def outcome(action: Action, done: Event) -> list[Event]:
        return [Event(kind="step", time_s=done.time_s, label=done.label, data={"accepted": [1]})]

    policy = Scripted(answer=at_start(Compute(op="a", label="x"), Compute(op="b", label="y")))
    drive(SimWorld(Mesh(dp=1), COST, outcomes={"a": outcome}), reacts=[policy])
    assert policy.heard[1:] == [(1.0, "step", -1, "x"), (3.0, "done", 0, "y")]


def test_views_show_facts_commits_and_members():
    seen = []

    def answer(events, view):
        seen.append((view.step, view.members, view.epoch, view.facts["n"]))
        commit = [Mark(name="commit", value=3), Compute(op="a", label="x")]
        return at_start(*commit)(events, view)

    faults = FaultScript((Fault(kind="kill", ranks=(1,), at_s=5.0),))
    world = SimWorld(Mesh(dp=2), COST, facts={"n": 4}, faults=faults)
    drive(world, reacts=[Scripted(answer=answer)])
    assert seen == [(0, (0, 1), 0, 4), (3, (0, 1), 0, 4), (3, (0,), 1, 4)]


def test_every_policy_hears_every_event_in_order_of_precedence():
    calls = []
    policies = [
        Scripted(answer=lambda events, view, name=name: calls.append(name) or [])
        for name in ("first", "second")
    ]
    drive(SimWorld(Mesh(dp=1), COST), reacts=policies)
    assert calls == ["first", "second"]
