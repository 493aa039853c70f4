"""The simulated world: exact histories for whole-number costs."""

from __future__ import annotations

import pytest

from phalanx.action import (
    Action,
    Alloc,
    Collective,
    Compute,
    Free,
    Mark,
    Move,
    Program,
    Recv,
    Send,
    Timer,
)
from phalanx.check import check_program
from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.errors import CheckError, JobError, PlanError
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.registry import build
from phalanx.trace import Trace
from phalanx.workload import toy_work
from phalanx.worlds.sim import SimWorld

COST = TableCost({"a": 1.0, "b": 2.0, "c": 3.0, "send": 1.0, "all_reduce": 4.0, "move": 2.0})


def play(mesh: Mesh, *lists: list[Action], axis: str = "pp", **options) -> Trace:
    program = Program.by_axis(mesh, axis, lists)
    return drive(SimWorld(mesh, COST, **options), program=program)


def send(peer: int, tensor: str, **rest) -> Send:
    return Send(axis="pp", peer=peer, tensor=tensor, lane=f"send:pp:{peer}", **rest)


def recv(peer: int, tensor: str, **rest) -> Recv:
    return Recv(axis="pp", peer=peer, tensor=tensor, lane=f"recv:pp:{peer}", **rest)


def all_reduce(label: str = "", axis: str = "dp", **rest) -> Collective:
    rest.setdefault("lane", f"axis:{axis}")
    return Collective(collective="all_reduce", axis=axis, label=label, **rest)


# ---- one rank ----------------------------------------------------------------------------------


def test_a_lane_runs_in_list_order_and_lanes_run_side_by_side():
    trace = play(
        Mesh(pp=1),
        [
            Compute(op="a", label="1"),
            Compute(op="c", label="2", lane="other"),
            Compute(op="b", label="3"),
            Compute(op="a", label="4", lane="other"),
        ],
    )
    assert trace.history() == [(0.0, 0, "1"), (0.0, 0, "2"), (1.0, 0, "3"), (3.0, 0, "4")]
    assert trace.end_s == 4.0
    assert trace.column("action_id").tolist() == ["1", "2", "3", "4"], "rows in order of issue"


def test_after_waits_for_labels_before_and_behind_it_in_the_list():
    trace = play(
        Mesh(pp=1),
        [
            Compute(op="a", label="last", lane="x", after=("slow", "quick")),
            Compute(op="a", label="quick"),
            Compute(op="c", label="slow", lane="y"),
        ],
    )
    assert trace.history() == [(0.0, 0, "quick"), (0.0, 0, "slow"), (3.0, 0, "last")]


def test_marks_and_memory_take_no_time_but_keep_their_turn():
    trace = play(
        Mesh(pp=1),
        [
            Alloc(tensor="x", num_bytes=8.0, label="take"),
            Compute(op="b", label="work"),
            Mark(name="half", value=0.5),
            Move(tensor="x", source="device", target="host", payload_bytes=8.0),
            Free(tensor="x", label="give"),
        ],
    )
    assert trace.history() == [
        *((0.0, 0, "take"), (0.0, 0, "work"), (2.0, 0, "half")),
        *((2.0, 0, "move"), (4.0, 0, "give")),
    ]
    assert trace.where(operator="free").columns["payload_bytes"].tolist() == [8.0]


def test_a_timer_occupies_no_lane_and_is_heard_of():
    world = SimWorld(Mesh(pp=1), COST)
    actions = [Compute(op="c", label="c"), Timer(delay_s=2.0, label="bell", item=7)]
    world.load(Program.alike(world.mesh, actions))
    assert [event.kind for event in world.next_events()] == ["start"]
    heard = world.next_events()
    assert [(e.kind, e.time_s, e.rank, e.label, e.item) for e in heard] == [
        ("timer", 2.0, 0, "bell", 7)
    ]
    assert [(e.kind, e.time_s) for e in world.next_events()] == [("step", 3.0)]
    assert world.next_events() == []
    assert world.close().where(operator="timer").columns["dur_s"].tolist() == [2.0]


def test_an_empty_program_ends_at_once():
    world = SimWorld(Mesh(pp=2), COST)
    trace = drive(world, program=Program.by_axis(world.mesh, "pp", [[], []]), num_steps=3)
    assert len(trace) == 0 and trace.end_s == 0.0


# ---- several ranks -----------------------------------------------------------------------------


def test_a_collective_starts_with_its_last_member_and_ends_for_all():
    mesh = Mesh(dp=3)
    lists = [
        [Compute(op=op), all_reduce("sum", lane="compute"), Compute(op="a", label="end")]
        for op in "abc"
    ]
    trace = play(mesh, *lists, axis="dp")
    assert [row for row in trace.history() if row[2] == "sum"] == [
        (3.0, r, "sum") for r in range(3)
    ]
    assert [row for row in trace.history() if row[2] == "end"] == [
        (7.0, r, "end") for r in range(3)
    ]


def test_collectives_of_one_group_are_one_stream_whatever_their_lanes():
    trace = play(
        Mesh(dp=2),
        [
            Compute(op="b", label="late"),
            all_reduce("first", after=("late",), lane="x"),
            all_reduce("second", lane="y"),
        ],
        [all_reduce("first", lane="x"), all_reduce("second", lane="y")],
        axis="dp",
    )
    starts = {(rank, name): start for start, rank, name in trace.history()}
    assert starts[0, "first"] == starts[1, "first"] == 2.0
    assert starts[0, "second"] == starts[1, "second"] == 6.0


def test_groups_of_different_coordinates_do_not_meet():
    mesh = Mesh(pp=2, dp=2)
    lists = [
        [Compute(op="a"), all_reduce("x", lane="compute")],
        [Compute(op="c"), all_reduce("x", lane="compute")],
    ]
    trace = play(mesh, *lists)
    assert [row for row in trace.history() if row[2] == "x"] == [
        *((1.0, 0, "x"), (1.0, 1, "x"), (3.0, 2, "x"), (3.0, 3, "x"))
    ]


def test_a_group_of_one_needs_nobody():
    trace = play(Mesh(dp=1), [all_reduce("x")], axis="dp")
    assert trace.history() == [(0.0, 0, "x")]
    assert trace.columns["wire_bytes"].tolist() == [0.0]


def test_a_message_is_a_rendezvous():
    trace = play(
        Mesh(pp=2),
        [Compute(op="b", label="make"), send(1, "x", label="out", after=("make",))],
        [recv(0, "x", label="in"), Compute(op="a", label="use", after=("in",))],
    )
    assert trace.history() == [
        *((0.0, 0, "make"), (2.0, 0, "out"), (2.0, 1, "in"), (3.0, 1, "use")),
    ]


def test_messages_match_by_tensor_and_in_order():
    trace = play(
        Mesh(pp=2),
        [send(1, "y", label="y0"), send(1, "x", label="x0"), send(1, "x", label="x1")],
        [
            Recv(axis="pp", peer=0, tensor="x", lane="r1", label="x0'"),
            Recv(axis="pp", peer=0, tensor="x", lane="r1", label="x1'"),
            Recv(axis="pp", peer=0, tensor="y", lane="r2", label="y0'"),
        ],
    )
    starts = {name: start for start, _, name in trace.history()}
    assert starts == {"y0": 0.0, "y0'": 0.0, "x0": 1.0, "x0'": 1.0, "x1": 2.0, "x1'": 2.0}


def test_peers_and_bytes_in_the_trace():
    mesh = Mesh(pp=2, dp=2)
    trace = play(
        mesh,
        [send(1, "x", payload_bytes=6.0), all_reduce(payload_bytes=10.0)],
        [recv(0, "x", payload_bytes=6.0), all_reduce(payload_bytes=10.0)],
    )
    assert trace.where(operator="send").columns["peer"].tolist() == [2, 3]
    assert trace.where(operator="recv").columns["peer"].tolist() == [0, 1]
    assert trace.where(operator="send").columns["wire_bytes"].tolist() == [6.0, 6.0]
    assert trace.where(operator="recv").columns["wire_bytes"].tolist() == [0.0, 0.0]
    assert trace.where(operator="all_reduce").columns["wire_bytes"].tolist() == [10.0] * 4
    assert trace.where(operator="all_reduce").columns["peer"].tolist() == [-1] * 4


@pytest.mark.parametrize("num_ranks, num_items", [(1, 3), (2, 2), (3, 7), (4, 8), (5, 5)])
def test_makespan_of_1f1b_is_its_formula(num_ranks: int, num_items: int):
    forward_s, backward_s = 1.0, 2.0
    mesh = Mesh(pp=num_ranks)
    order = build("pipeline", "1f1b")
    program = lower(toy_work(num_ranks, [4] * num_items), mesh, order, grain="stage")
    check_program(program)
    cost = TableCost({"stage.F": forward_s, "stage.B": backward_s}, missing_s=0.0)
    trace = drive(SimWorld(mesh, cost), program=program)
    assert trace.end_s == (num_items + num_ranks - 1) * (forward_s + backward_s)


# ---- steps -------------------------------------------------------------------------------------


def test_steps_are_counted_and_the_next_waits_in_every_lane():
    mesh = Mesh(pp=2)
    world = SimWorld(mesh, COST)
    lists = [[Compute(op="a", label="x")], [Compute(op="c", label="x")]]
    trace = drive(world, program=Program.by_axis(mesh, "pp", lists), num_steps=3)
    assert trace.where(rank=0).columns["start_s"].tolist() == [0.0, 1.0, 2.0], "rank 1 may lag"
    assert trace.where(rank=1).columns["start_s"].tolist() == [0.0, 3.0, 6.0]
    assert trace.where(rank=1).columns["step"].tolist() == [1, 2, 3]


def test_a_list_may_wait_for_a_label_of_an_earlier_step():
    mesh = Mesh(pp=1)
    world = SimWorld(mesh, COST)
    world.load(Program.alike(mesh, [Compute(op="c", label="old", lane="x")]))
    world.load(Program.alike(mesh, [Compute(op="a", label="new", after=("old",))]))
    while world.next_events():
        pass
    assert world.close().history() == [(0.0, 0, "old"), (3.0, 0, "new")]


# ---- memory ------------------------------------------------------------------------------------


def test_memory_peaks_follow_time_not_list_order():
    mesh = Mesh(pp=1)
    actions = [
        Alloc(tensor="x", num_bytes=10.0, lane="x"),
        Compute(op="c", lane="x", label="x"),
        Free(tensor="x", lane="x"),
        Compute(op="a", label="y0"),
        Alloc(tensor="y", num_bytes=5.0),
        Compute(op="a"),
        Free(tensor="y"),
        Alloc(tensor="h", num_bytes=100.0, memory="host"),
    ]
    world = SimWorld(mesh, COST)
    trace = drive(world, program=Program.alike(mesh, actions))
    assert world.peak_bytes() == {0: 15.0}
    assert world.peak_bytes("host") == {0: 100.0}
    assert trace.notes["peak_bytes"] == {"device": {"0": 15.0}, "host": {"0": 100.0}}
    assert "alloc.host" in trace.column("operator")


def test_memory_over_the_limit_names_rank_label_peak_and_limit():
    mesh = Mesh(pp=2)
    lists = [
        [Alloc(tensor="x", num_bytes=1024.0)],
        [Alloc(tensor="x", num_bytes=3072.0), Alloc(tensor="y", num_bytes=2048.0, label="grow")],
    ]
    with pytest.raises(CheckError) as caught:
        play(mesh, *lists, memory_bytes=4096.0)
    error = caught.value
    assert error.code == "check/memory"
    assert error.where == "rank 1: grow"
    assert error.value == "peak 5 KiB" and "4 KiB" in error.rule
    assert "3 KiB  x" in error.detail


@pytest.mark.parametrize(
    "actions",
    [
        [Free(tensor="x")],
        [Alloc(tensor="x", num_bytes=1.0), Alloc(tensor="x", num_bytes=1.0)],
        [Alloc(tensor="x", num_bytes=1.0), Free(tensor="x"), Free(tensor="x")],
    ],
)
def test_handles_are_taken_once_and_given_back_once(actions: list[Action]):
    with pytest.raises(CheckError) as caught:
        play(Mesh(pp=1), actions)
    assert caught.value.code == "check/handle"


# ---- programs that are wrong -------------------------------------------------------------------


def test_a_receive_without_send_is_a_deadlock_that_says_who_waits_for_what():
    with pytest.raises(CheckError) as caught:
        play(
            Mesh(pp=2, dp=2),
            [all_reduce("sum"), Compute(op="a")],
            [
                all_reduce("sum"),
                recv(0, "x", label="in"),
                Compute(op="a", label="use", after=("in",)),
            ],
        )
    error = caught.value
    assert error.code == "check/deadlock" and error.where == "rank 2" and error.value == "in"
    assert "rank 2: last collective all_reduce sum" in error.detail
    assert "recv:pp:0: in waits for rank 0 to send x" in error.detail
    assert "compute: use waits for in" in error.detail
    assert "rank 0" not in error.detail.replace("rank 0 to", "")


def test_a_collective_without_all_members_names_who_is_missing():
    with pytest.raises(CheckError) as caught:
        play(Mesh(dp=3), [all_reduce("x")], [all_reduce("x")], [], axis="dp")
    assert caught.value.code == "check/deadlock"
    assert "x waits for ranks 2" in caught.value.detail


def test_members_that_disagree_on_a_collective_are_named():
    other = Collective(collective="all_gather", axis="dp", label="y", lane="axis:dp")
    with pytest.raises(CheckError) as caught:
        play(Mesh(dp=2), [all_reduce("x")], [other], axis="dp")
    assert caught.value.code == "check/collective"
    assert "ranks 0 and 1" in str(caught.value)
    assert "all_reduce (x)" in str(caught.value) and "all_gather (y)" in str(caught.value)


def test_a_message_of_another_size_is_refused():
    with pytest.raises(CheckError) as caught:
        play(Mesh(pp=2), [send(1, "x", payload_bytes=4.0)], [recv(0, "x", payload_bytes=8.0)])
    assert caught.value.code == "check/size"


def test_unknown_and_doubled_labels_axes_and_peers_are_refused():
    for code, kind, actions in [
        ("check/label", CheckError, [Compute(op="a", after=("nowhere",))]),
        ("check/label", CheckError, [Compute(op="a", label="x"), Compute(op="a", label="x")]),
        ("mesh/axis", JobError, [all_reduce(axis="tp")]),
        ("mesh/rank", JobError, [send(3, "x")]),
    ]:
        with pytest.raises(kind) as caught:
            play(Mesh(pp=1), actions)
        assert caught.value.code == code


def test_a_program_of_another_mesh_is_refused():
    with pytest.raises(PlanError) as caught:
        SimWorld(Mesh(pp=2), COST).load(Program.alike(Mesh(pp=3), []))
    assert caught.value.code == "plan/illegal"
