"""What faults do in virtual time: what survives, what is late, and what the error says."""

from __future__ import annotations

from math import inf

import pytest

from phalanx.action import Action, Alloc, Collective, Compute, Mark, Program, Recv, Send
from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.errors import JobError, WorldError
from phalanx.mesh import Mesh
from phalanx.policy import React
from phalanx.trace import Trace
from phalanx.worlds.faults import Fault, FaultScript
from phalanx.worlds.sim import SimWorld

COST = TableCost({"a": 1.0, "b": 2.0, "c": 3.0, "send": 2.0, "all_reduce": 4.0})


def play(faults: list[Fault], *lists: list[Action], num_steps: int = 1) -> Trace:
    mesh = Mesh(dp=len(lists))
    world = SimWorld(mesh, COST, faults=FaultScript(tuple(faults)))
    return drive(world, program=Program.by_axis(mesh, "dp", lists), num_steps=num_steps)


def meet(label: str = "sum", **rest) -> Collective:
    rest.setdefault("lane", "compute")
    return Collective(collective="all_reduce", axis="dp", label=label, **rest)


def ends(trace: Trace, rank: int) -> dict[str, float]:
    of_rank = trace.where(rank=rank)
    moments = (of_rank.columns["start_s"] + of_rank.columns["dur_s"]).tolist()
    return dict(zip(of_rank.column("action_id").tolist(), moments))


# ---- planned actions ---------------------------------------------------------------------------


def test_a_pause_delays_what_runs_and_holds_what_would_start():
    pause = Fault(kind="pause", ranks=(0,), at_s=2.0, duration_s=5.0)
    trace = play(
        [pause],
        [Compute(op="c", label="1"), Compute(op="a", label="2")],
        [Compute(op="c", label="1"), Compute(op="a", label="2")],
    )
    assert ends(trace, 0) == {"1": 8.0, "2": 9.0}
    assert ends(trace, 1) == {"1": 3.0, "2": 4.0}


def test_what_ends_at_the_moment_of_a_pause_is_paused():
    pause = Fault(kind="pause", ranks=(0,), at_s=3.0, duration_s=5.0)
    trace = play([pause], [Compute(op="c", label="1"), Compute(op="a", label="2")])
    assert ends(trace, 0) == {"1": 8.0, "2": 9.0}


def test_pauses_add_up():
    pauses = [
        Fault(kind="pause", ranks=(0,), at_s=1.0, duration_s=4.0),
        Fault(kind="pause", ranks=(0,), at_s=2.0, duration_s=1.0),
    ]
    trace = play(pauses, [Compute(op="b", label="1"), Compute(op="a", label="2")])
    assert ends(trace, 0) == {"1": 7.0, "2": 8.0}


def test_a_paused_member_stalls_its_collective_before_and_under_way():
    lists = [[meet("1"), meet("2")], [meet("1"), Compute(op="a"), meet("2")]]
    before = play([Fault(kind="pause", ranks=(0,), at_s=4.5, duration_s=3.0)], *lists)
    assert ends(before, 1)["2"] == 7.5 + 4.0, "met at 5, started when the pause was over"
    during = play([Fault(kind="pause", ranks=(0, 1), at_s=1.0, duration_s=3.0)], *lists)
    assert ends(during, 0)["1"] == ends(during, 1)["1"] == 7.0, "once, not once per member"


def test_a_slow_rank_takes_longer_for_what_starts_within():
    slow = Fault(kind="slow", ranks=(0,), at_s=1.0, duration_s=8.0, factor=3.0)
    trace = play([slow], [Compute(op="b", label=name) for name in "1234"])
    assert ends(trace, 0) == {"1": 2.0, "2": 8.0, "3": 14.0, "4": 16.0}


def test_a_partition_delays_what_crosses_it_and_nothing_else():
    cut = Fault(kind="partition", ranks=(0, 1), at_s=0.0, duration_s=10.0)
    mesh = Mesh(half=2, dp=2)
    inside = Collective(collective="all_reduce", axis="dp", label="inside")
    across = Collective(collective="all_reduce", axis="half", label="across")
    world = SimWorld(mesh, COST, faults=FaultScript((cut,)))
    trace = drive(world, program=Program.alike(mesh, [inside, across]))
    assert {start for start, _, name in trace.history() if name == "inside"} == {0.0}
    assert {start for start, _, name in trace.history() if name == "across"} == {10.0}


def test_a_killed_rank_hangs_those_who_need_it_and_no_one_else():
    kill = Fault(kind="kill", ranks=(2,), at_s=1.5)
    mesh = Mesh(pair=2, dp=2)
    actions = [Compute(op="a", label="w"), meet("x"), Compute(op="a", label="end")]
    world = SimWorld(mesh, COST, faults=FaultScript((kill,)))
    with pytest.raises(WorldError) as caught:
        drive(world, program=Program.alike(mesh, actions))
    error = caught.value
    assert error.code == "world/dead" and error.where == "rank 2"
    assert "1 ranks still need it" in error.rule
    assert "rank 3: last collective none" in error.detail and "x was cut off" in error.detail
    trace = world.close()
    assert ends(trace, 0) == ends(trace, 1) == {"w": 1.0, "x": 5.0, "end": 6.0}
    assert ends(trace, 2) == {"w": 1.0, "x": 1.5}, "it died in the collective"


def test_a_rank_that_dies_before_it_arrives_is_named_by_those_who_wait():
    kill = Fault(kind="kill", ranks=(1,), at_s=0.5)
    with pytest.raises(WorldError) as caught:
        play([kill], [meet("x")], [Compute(op="a"), meet("x")])
    assert "x waits for ranks 1 (dead)" in caught.value.detail


def test_a_rank_may_die_when_its_work_is_done():
    kill = Fault(kind="kill", ranks=(1,), at_s=2.0)
    trace = play([kill], [Compute(op="c", label="w")], [Compute(op="a", label="w")])
    assert ends(trace, 0) == {"w": 3.0} and ends(trace, 1) == {"w": 1.0}


@pytest.mark.parametrize("killed_s", [0.0, 0.5, 1.0, 1.5])
def test_steps_go_on_when_the_rank_that_announces_them_dies(killed_s: float):
    kill = Fault(kind="kill", ranks=(0,), at_s=killed_s)
    trace = play([kill], [Compute(op="a")], [Compute(op="b")], num_steps=3)
    assert trace.where(rank=1).columns["step"].tolist() == [1, 2, 3]
    assert trace.where(rank=1).columns["start_s"].tolist() == [0.0, 2.0, 4.0]


def test_faults_by_step_strike_before_the_first_action_of_the_step():
    pause = Fault(kind="pause", ranks=(1,), at_step=2, duration_s=10.0)
    trace = play([pause], [Compute(op="a")], [Compute(op="a")], num_steps=3)
    assert trace.where(rank=0).columns["start_s"].tolist() == [0.0, 1.0, 2.0]
    assert trace.where(rank=1).columns["start_s"].tolist() == [0.0, 1.0, 12.0]


def test_faults_by_label_strike_before_the_action():
    kill = Fault(kind="kill", ranks=(1,), at_label="2")
    lists = [[Compute(op="a", label=f"{n}") for n in range(4)] for _ in range(2)]
    trace = play([kill], *lists)
    assert list(ends(trace, 1)) == ["0", "1"] and list(ends(trace, 0)) == ["0", "1", "2", "3"]
    pause = Fault(kind="pause", ranks=(0, 1), at_label="2", duration_s=5.0)
    trace = play([pause], *lists)
    assert ends(trace, 0)["2"] == ends(trace, 1)["2"] == 8.0


# ---- messages ----------------------------------------------------------------------------------


def message(number: int) -> tuple[Send, Recv]:
    send = Send(axis="dp", peer=1, tensor="x", label=f"s{number}")
    return send, Recv(axis="dp", peer=0, tensor="x", label=f"r{number}")


def test_a_dropped_message_leaves_its_receiver_waiting():
    sends, recvs = zip(message(0), message(1))
    drop = Fault(kind="drop", ranks=(0,), at_s=0.0)
    with pytest.raises(WorldError) as caught:
        play([drop], list(sends), list(recvs))
    error = caught.value
    assert error.code == "world/timeout"
    assert "a message was lost: s0 of rank 0 to 1" in error.rule
    assert error.where == "rank 1" and error.value == "r1", "the second message filled the first"


def test_messages_within_the_time_of_a_drop_are_lost_and_later_ones_arrive():
    sends, _ = zip(message(0), message(1), message(2))
    drop = Fault(kind="drop", ranks=(0,), at_s=0.0, duration_s=3.0)
    recv = Recv(axis="dp", peer=0, tensor="x", label="r")
    trace = play([drop], list(sends), [recv])
    assert ends(trace, 0) == {"s0": 2.0, "s1": 4.0, "s2": 6.0} and ends(trace, 1) == {"r": 6.0}


def test_a_duplicated_message_arrives_twice():
    sends, recvs = zip(message(0), message(1))
    twice = Fault(kind="duplicate", ranks=(0,), at_s=0.0)
    trace = play([twice], [sends[0]], list(recvs))
    assert ends(trace, 0) == {"s0": 2.0}, "one send in the trace"
    assert ends(trace, 1) == {"r0": 2.0, "r1": 4.0}


def test_a_duplicate_that_nobody_receives_does_no_harm():
    sends, recvs = zip(message(0))
    twice = Fault(kind="duplicate", ranks=(0,), at_s=0.0)
    assert ends(play([twice], list(sends), list(recvs)), 1) == {"r0": 2.0}


def test_a_partition_for_good_is_told_from_a_wrong_program():
    cut = Fault(kind="partition", ranks=(0,), at_s=0.0, duration_s=inf)
    with pytest.raises(WorldError) as caught:
        play([cut], [meet("x")], [meet("x")])
    assert caught.value.code == "world/timeout" and "never heals" in caught.value.rule


def test_a_pause_for_good_is_told_from_a_wrong_program():
    for at_s in (0.0, 0.5, 1.5):
        pause = Fault(kind="pause", ranks=(1,), at_s=at_s, duration_s=inf)
        with pytest.raises(WorldError) as caught:
            play([pause], [Compute(op="a"), meet("x")], [Compute(op="a"), meet("x")])
        assert caught.value.code == "world/timeout"
        assert "rank 1 is paused for good" in caught.value.rule


# ---- decisions ---------------------------------------------------------------------------------


class Reform(React):
    """Three members add up in rounds; a leave or join begins the round again in a new epoch."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def start(self, view):
        return {"done": set(), "round": 0, "epoch": 0}

    def on(self, state, events, view):
        for event in events:
            if event.kind in ("leave", "join"):
                state["epoch"], state["done"] = view.epoch, set()
                return self.next(state, view)
        state["done"] |= {e.rank for e in events if e.kind == "done" and e.label == self.tag(state)}
        if events[0].kind == "start":
            return self.next(state, view)
        if state["done"] >= set(view.members) and state["round"] < self.rounds:
            state["round"] += 1
            state["done"] = set()
            commit = Mark(name="commit", value=state["round"], lane="control")
            return [commit, *self.next(state, view)]
        return []

    def tag(self, state) -> str:
        return f"load@{state['round']}.{state['epoch']}"

    def next(self, state, view):
        if state["round"] == self.rounds:
            return []
        exchange = f"sum@{state['round']}.{state['epoch']}"
        add = Collective(
            collective="all_reduce",
            axis="dp",
            members=view.members,
            epoch=view.epoch,
            label=exchange,
            lane=f"epoch:{view.epoch}",
        )
        return [add, Compute(op="a", label=self.tag(state), lane="control", after=(exchange,))]


@pytest.mark.parametrize(
    "killed_s, redone, given_up",
    [
        (5.0, 0, False),  # its first load ends at 5 s: struck before that
        (6.0, 1, True),  # within the exchange of the second round, 5 s to 9 s
        (9.5, 1, False),  # after it
    ],
)
def test_a_membership_goes_on_without_a_dead_member_and_takes_it_back(killed_s, redone, given_up):
    kill = Fault(kind="kill", ranks=(1,), at_s=killed_s)
    restart = Fault(kind="restart", ranks=(1,), at_step=4)
    world = SimWorld(Mesh(dp=3), COST, faults=FaultScript((kill, restart), detect_s=1.0))
    trace = drive(world, reacts=[Reform(rounds=6)])
    assert len(trace.where(operator="commit", rank=0)) == 6
    assert world.view("job").step == 6 and world.view("job").members == (0, 1, 2)
    members_of_epoch: dict[str, set[int]] = {}
    for row in trace.where(operator="all_reduce").rows():
        epoch = row["action_id"].split(".")[1]
        members_of_epoch.setdefault(epoch, set()).add(row["rank"])
    assert members_of_epoch == {"0": {0, 1, 2}, "1": {0, 2}, "2": {0, 1, 2}}
    loads = set(trace.where(rank=0, operator="a").column("action_id").tolist())
    assert (f"load@{redone}.0" not in loads) == given_up, (
        "what waits for a lost exchange is not run"
    )
    assert f"load@{redone}.1" in loads


def test_detection_takes_its_time():
    faults = FaultScript((Fault(kind="kill", ranks=(1,), at_s=5.5),), detect_s=7.0)
    world = SimWorld(Mesh(dp=2), COST, faults=faults)
    heard = []

    class Listen(Reform):
        def on(self, state, events, view):
            heard.extend((event.time_s, event.kind) for event in events)
            return super().on(state, events, view)

    drive(world, reacts=[Listen(rounds=2)])
    assert (12.5, "leave") in heard


def test_memory_of_a_dead_rank_is_gone():
    kill = Fault(kind="kill", ranks=(0,), at_s=1.0)
    back = Fault(kind="restart", ranks=(0,), at_s=2.0)
    alloc = Alloc(tensor="x", num_bytes=8.0)

    class Again(React):
        def start(self, view):
            return None

        def on(self, state, events, view):
            return [alloc] if events[0].kind in ("start", "join") else []

    world = SimWorld(Mesh(dp=1), COST, faults=FaultScript((kill, back)))
    trace = drive(world, reacts=[Again()])
    assert len(trace.where(operator="alloc")) == 2 and world.peak_bytes() == {0: 8.0}


def test_a_fault_of_an_unknown_rank_is_refused_at_once():
    with pytest.raises(JobError):
        SimWorld(Mesh(dp=2), COST, faults=FaultScript((Fault(kind="kill", ranks=(2,), at_s=0.0),)))
