"""Laws of the simulator over random programs: a second way to compute times, and folding."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.action import Action, Collective, Compute, Program, Recv, Send
from phalanx.check import check_program
from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.errors import PlanError
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.policy import Event
from phalanx.registry import build
from phalanx.trace import Trace
from phalanx.workload import toy_work
from phalanx.worlds.faults import FaultScript
from phalanx.worlds.sim import Links, SimWorld

LANES = ("x", "y", "z")


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, dict[str, float]]:
    """Programs that can run: operations are drawn one by one and appended to those who take part.

    Collectives of an axis stay on one lane, and an action waits for earlier ones of its rank only.
    """
    mesh = Mesh(pp=draw(st.integers(1, 3)), dp=draw(st.integers(1, 3)))
    lists: list[list[Action]] = [[] for _ in range(mesh.size)]
    seconds: dict[str, float] = {}

    def common(rank: int, number: int) -> dict:
        known = [action.label for action in lists[rank]]
        after = draw(st.lists(st.sampled_from(known), max_size=2, unique=True)) if known else []
        return {"label": f"{number}", "after": tuple(after)}

    for number in range(draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(("compute", "compute", "message", "pp", "dp")))
        rank = draw(st.integers(0, mesh.size - 1))
        seconds[f"{number}"] = draw(st.integers(0, 4))
        if kind == "compute":
            lane = draw(st.sampled_from(LANES))
            lists[rank].append(Compute(op="op", lane=lane, **common(rank, number)))
        elif kind == "message":
            at, here = draw(st.integers(0, mesh.degree("pp") - 1)), mesh.coordinate(rank, "pp")
            peer = mesh.peer(rank, "pp", at)
            if peer != rank:
                lane, tensor = draw(st.sampled_from(LANES)), f"t{number}"
                ends = {"axis": "pp", "tensor": tensor, "lane": lane}
                lists[rank].append(Send(peer=at, **ends, **common(rank, number)))
                lists[peer].append(Recv(peer=here, **ends, **common(peer, number)))
        else:
            for member in mesh.group(rank, kind):
                more = {"lane": f"axis:{kind}", **common(member, number)}
                lists[member].append(Collective(collective="all_reduce", axis=kind, **more))
    return Program(mesh, tuple(lists), tuple(range(mesh.size))), seconds


def longest_paths(program: Program, seconds: dict[str, float]) -> dict[tuple[int, str], float]:
    """Start of every action by repeated relaxation, which knows no events and no queues."""
    start = {(r, a.label): 0.0 for r in range(program.mesh.size) for a in program.of(r)}
    for _ in range(len(start) + 1):
        for rank in range(program.mesh.size):
            lanes: dict[str, float] = {}
            for action in program.of(rank):
                ends = [start[rank, label] + seconds[label] for label in action.after]
                key = (rank, action.label)
                start[key] = max([start[key], lanes.get(action.lane, 0.0), *ends])
                lanes[action.lane] = start[key] + seconds[action.label]
        for label in seconds:  # those who meet start together
            members = [(r, each) for r, each in start if each == label]
            for key in members:
                start[key] = max(start[member] for member in members)
    return start


@settings(max_examples=150, deadline=None)
@given(programs())
def test_starts_are_the_longest_paths(drawn):
    program, seconds = drawn
    trace = drive(SimWorld(program.mesh, TableCost(seconds)), program=program)
    found = {(rank, name): start for start, rank, name in trace.history()}
    assert found == longest_paths(program, seconds)


@settings(max_examples=50, deadline=None)
@given(programs())
def test_the_same_program_has_the_same_trace(drawn):
    program, seconds = drawn
    one, other = (
        list(drive(SimWorld(program.mesh, TableCost(seconds)), program=program).rows())
        for _ in range(2)
    )
    assert one == other


# ---- folding -----------------------------------------------------------------------------------


def rows_of(trace: Trace, rank: int) -> list[tuple]:
    columns = ("action_id", "operator", "start_s", "dur_s", "wire_bytes", "payload_bytes")
    of_rank = trace.where(rank=rank)
    return list(zip(*(of_rank.column(name).tolist() for name in columns)))


def assert_fold_is_exact(program: Program, cost: TableCost) -> SimWorld:
    plain = drive(SimWorld(program.mesh, cost), program=program)
    world = SimWorld(program.mesh, cost, fold=True)
    folded = drive(world, program=program)
    players = world._engine.matcher.player.tolist()
    assert sum(folded.notes["ranks_played"].values()) == program.mesh.size
    for rank, player in enumerate(players):
        assert rows_of(plain, rank) == rows_of(folded, player), f"rank {rank} played by {player}"
    return world


@settings(max_examples=60, deadline=None)
@given(programs())
def test_folding_any_program_is_exact(drawn):
    program, seconds = drawn
    assert_fold_is_exact(program, TableCost(seconds))


@settings(max_examples=15, deadline=None)
@given(
    st.permutations(["pp", "shard", "tp"]),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    st.integers(1, 4),
)
def test_folding_lowered_steps_is_exact_and_plays_one_rank_a_stage(names, sizes, num_items):
    mesh = Mesh(dict(zip(names, sizes)))
    specs = [build("tensor", "megatron"), build("data", "fsdp")]
    work = toy_work(3, [8] * num_items)
    program = lower(work, mesh, build("pipeline", "1f1b"), specs)
    check_program(program)
    seconds = {"mlp.F": 3, "mlp.B": 7, "all_gather": 2, "reduce_scatter": 3, "send": 1}
    world = assert_fold_is_exact(program, TableCost(seconds, missing_s=1.0))
    assert len(world.ranks) == mesh.degree("pp")


def test_ranks_that_share_a_list_but_not_their_partners_are_told_apart():
    mesh = Mesh(pp=2, dp=2)  # dp rank 0 of stage 1 is slower, so stage 0's ranks differ too
    shared = [Send(axis="pp", peer=1, tensor="t", lane="s", label="s")]
    lists = (
        tuple(shared),
        (Recv(axis="pp", peer=0, tensor="t", lane="r"),),
        (Compute(op="op", label="w"), Recv(axis="pp", peer=0, tensor="t", lane="r", after=("w",))),
    )
    program = Program(mesh, lists, (0, 0, 2, 1))
    world = assert_fold_is_exact(program, TableCost({"op": 5.0, "send": 1.0}))
    assert list(world.ranks) == [0, 1, 2, 3]


def test_price_classes_are_never_folded_together():
    class Uneven(TableCost):
        def compute_s(self, action: Compute, rank: int) -> float:
            return 1.0 + (rank == 2)

        def rank_class(self, rank: int) -> int:
            return int(rank == 2)

    program = Program.alike(Mesh(dp=4), [Compute(op="op")])
    world = assert_fold_is_exact(program, Uneven({}))
    assert list(world.ranks) == [0, 2]


def test_folding_refuses_what_tells_ranks_apart():
    mesh = Mesh(dp=4)
    cost = TableCost({"all_reduce": 1.0})
    for options in ({"faults": FaultScript()}, {"links": Links(link_of=lambda s, t: None)}):
        with pytest.raises(PlanError):
            SimWorld(mesh, cost, fold=True, **options)
    world = SimWorld(mesh, cost, fold=True)
    with pytest.raises(PlanError):
        world.issue([Compute(op="x")])
    listed = Collective(collective="all_reduce", axis="dp", members=(0, 1))
    with pytest.raises(PlanError):
        SimWorld(mesh, cost, fold=True).load(Program.alike(mesh, [listed]))


def test_events_of_a_folded_program_are_those_of_its_lowest_rank():
    mesh = Mesh(dp=4)
    world = SimWorld(mesh, TableCost({"op": 2.0}), fold=True)
    world.load(Program.alike(mesh, [Compute(op="op")]))
    world.next_events()
    assert world.next_events() == [Event(kind="step", time_s=2.0, rank=0, item=1)]
