"""Decisions of the streaming policy: steps, order, sizes; no world."""

from __future__ import annotations

from itertools import pairwise

import pytest

from phalanx.action import Collective, Compute
from phalanx.errors import JobError, PlanError
from phalanx.mesh import Mesh
from phalanx.policies.sync.streaming import Streaming
from phalanx.policy import Event, View
from phalanx.registry import build


def make_view(mesh: Mesh, sizes: tuple[int, ...]) -> View:
    return View(mesh=mesh, members=tuple(range(mesh.size)), facts={"fragment_bytes": sizes})


def decide(policy: Streaming, view: View, num_steps: int) -> dict[int, list]:
    state = policy.start(view)
    steps = range(1, num_steps + 1)
    return {t: policy.on(state, [Event(kind="step", time_s=0.0, item=t)], view) for t in steps}


def exchanged(by_step: dict[int, list], fragment: int) -> list[int]:
    return [
        t
        for t, actions in by_step.items()
        for a in actions
        if isinstance(a, Collective) and a.item == fragment
    ]


def test_offsets_of_the_paper():
    policy = Streaming(inner_steps=100, num_fragments=2, overlap_steps=1)
    by_step = decide(policy, make_view(Mesh(island=2), (8, 8)), 420)
    assert exchanged(by_step, 0) == [100, 200, 300, 400]
    assert exchanged(by_step, 1) == [150, 250, 350]


@pytest.mark.parametrize(("inner_steps", "num_fragments"), [(7, 3), (100, 8), (100, 36), (5, 5)])
def test_every_fragment_keeps_its_exact_period(inner_steps, num_fragments):
    policy = Streaming(inner_steps=inner_steps, num_fragments=num_fragments)
    view = make_view(Mesh(island=3), (4,) * num_fragments)
    by_step = decide(policy, view, 4 * inner_steps)
    firsts = []
    for fragment in range(num_fragments):
        steps = exchanged(by_step, fragment)
        assert all(b - a == inner_steps for a, b in pairwise(steps))
        assert inner_steps <= steps[0] < 2 * inner_steps
        firsts.append(steps[0])
    assert sorted(set(firsts)) == firsts, "two fragments never share a step"


def test_apply_follows_tau_steps_later_and_waits_for_its_exchange():
    policy = Streaming(inner_steps=4, num_fragments=2, overlap_steps=3, blend=0.5)
    by_step = decide(policy, make_view(Mesh(island=2), (12, 20)), 11)
    log = {t: [(a.operator, a.label, a.after) for a in acts] for t, acts in by_step.items() if acts}
    assert log == {
        4: [
            ("outer.delta", "delta.0@4", ()),
            ("all_reduce", "exchange.0@4", ("delta.0@4",)),
        ],
        6: [
            ("outer.delta", "delta.1@6", ()),
            ("all_reduce", "exchange.1@6", ("delta.1@6",)),
        ],
        7: [("outer.apply", "apply.0@4", ("exchange.0@4",))],
        8: [
            ("outer.delta", "delta.0@8", ()),
            ("all_reduce", "exchange.0@8", ("delta.0@8",)),
        ],
        9: [("outer.apply", "apply.1@6", ("exchange.1@6",))],
        10: [
            ("outer.delta", "delta.1@10", ()),
            ("all_reduce", "exchange.1@10", ("delta.1@10",)),
        ],
        11: [("outer.apply", "apply.0@8", ("exchange.0@8",))],
    }


def test_no_fragment_is_exchanged_twice_at_a_time():
    policy = Streaming(inner_steps=6, num_fragments=4, overlap_steps=5)
    in_flight: set[int] = set()
    for actions in decide(policy, make_view(Mesh(island=2), (4,) * 4), 60).values():
        for action in actions:
            if isinstance(action, Collective):
                assert action.item not in in_flight
                in_flight.add(action.item)
            elif action.op == "outer.apply":
                in_flight.remove(action.item)


def test_payload_over_a_period_equals_one_whole_exchange():
    sizes = (12, 40, 8)
    policy = Streaming(inner_steps=10, num_fragments=3, overlap_steps=2)
    by_step = decide(policy, make_view(Mesh(island=2), sizes), 50)
    in_period = [a for t in range(31, 41) for a in by_step[t] if isinstance(a, Collective)]
    assert sum(a.payload_bytes for a in in_period) == sum(sizes)
    assert max(a.payload_bytes for a in in_period) == max(sizes)


def test_repeated_step_events_decide_once():
    policy = Streaming(inner_steps=2)
    view = make_view(Mesh(island=2), (4,))
    state = policy.start(view)
    events = [Event(kind="step", time_s=0.0, rank=r, item=2) for r in (0, 1)]
    assert len(policy.on(state, events, view)) == 3
    assert policy.on(state, events, view) == []


def test_after_a_leave_what_was_in_flight_is_dropped_and_members_are_named():
    policy = Streaming(inner_steps=4, overlap_steps=2)
    view = make_view(Mesh(island=3, shard=2), (4,))
    state = policy.start(view)
    on = policy.on
    assert len(on(state, [Event(kind="step", time_s=0.0, item=4)], view)) == 2
    view.members, view.epoch = (0, 1, 4, 5), 1
    leave = [Event(kind="leave", time_s=0.0, rank=r) for r in (2, 3)]
    assert on(state, [*leave, Event(kind="step", time_s=0.0, item=6)], view) == []
    actions = on(state, [Event(kind="step", time_s=0.0, item=8)], view)
    groups = [(a.members, a.epoch) for a in actions if isinstance(a, Collective)]
    assert groups == [((0, 4), 1), ((1, 5), 1)]
    actions = on(state, [Event(kind="step", time_s=0.0, item=10)], view)
    assert [a.batch["num_contributors"] for a in actions if isinstance(a, Compute)] == [2, 2]


@pytest.mark.parametrize(
    ("options", "where", "legal"),
    [
        ({"inner_steps": 0}, "policy.sync.inner_steps", (1,)),
        ({"inner_steps": 4, "num_fragments": 5}, "policy.sync.num_fragments", (4,)),
        ({"inner_steps": 4, "overlap_steps": 4}, "policy.sync.overlap_steps", (3,)),
        ({"inner_steps": 4, "blend": 1.5}, "policy.sync.blend", (1.0,)),
    ],
)
def test_illegal_options_name_the_nearest_legal_value(options, where, legal):
    with pytest.raises(PlanError) as caught:
        Streaming(**options)
    assert (caught.value.code, caught.value.where, caught.value.legal) == (
        "plan/illegal",
        where,
        legal,
    )


def test_fragments_must_match_the_model():
    with pytest.raises(PlanError, match="cut into 3"):
        Streaming(inner_steps=4, num_fragments=2).start(make_view(Mesh(island=2), (4, 4, 4)))


def test_unknown_option_names_the_nearest():
    with pytest.raises(JobError, match="num_fragments"):
        build("sync", {"name": "streaming", "inner_steps": 4, "num_fragment": 2})
