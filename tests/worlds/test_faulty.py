"""One fault script, three worlds: what survives and what the others say."""

from __future__ import annotations

from math import inf

import pytest
import torch

from phalanx.action import Compute, Program, Recv, Send
from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.errors import JobError, PhalanxError, WorldError
from phalanx.mesh import Mesh
from phalanx.worlds.dist import DistWorld
from phalanx.worlds.faults import Fault, FaultScript
from phalanx.worlds.faulty import FaultyWorld
from phalanx.worlds.local import LocalWorld
from phalanx.worlds.sim import SimWorld
from tests.ranks import DIED, current_store, run_ranks
from tests.worlds import programs


def script(**fault) -> FaultScript:
    return FaultScript((Fault(**fault),))


def play_locally(program: Program, faults: FaultScript) -> tuple[str, LocalWorld | None]:
    world = LocalWorld(program.mesh, programs.OPS)
    try:
        world.trace = drive(FaultyWorld(world, faults), program=program)
    except PhalanxError as error:
        return error.code, None
    return "", world


def play_simulated(program: Program, faults: FaultScript) -> str:
    try:
        drive(SimWorld(program.mesh, TableCost({}, missing_s=1.0), faults=faults), program=program)
    except PhalanxError as error:
        return error.code
    return ""


def play(rank: int, world_size: int, program: Program, faults: FaultScript, timeout_s: float):
    world = DistWorld(program.mesh, programs.OPS, rank, current_store(), timeout_s=timeout_s)
    try:
        trace = drive(FaultyWorld(world, faults), program=program)
    except PhalanxError as error:
        return error.code, error.where, None
    return "", "", (trace, world.tensors[f"x:{rank}"])


def undisturbed(program: Program) -> LocalWorld:
    world = LocalWorld(program.mesh, programs.OPS)
    drive(world, program=program)
    return world


@pytest.mark.dist
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ({"kind": "kill", "ranks": (1,), "at_label": "send1"}, "world/dead"),
        ({"kind": "kill", "ranks": (1,), "at_step": 0}, "world/dead"),
        ({"kind": "drop", "ranks": (1,), "at_label": "send1"}, "world/timeout"),
        ({"kind": "partition", "ranks": (1,), "at_s": 0.0, "duration_s": inf}, "world/timeout"),
    ],
    ids=["kill at label", "kill at step", "drop", "partition"],
)  # fmt: skip
def test_what_stops_the_others_has_the_same_code_in_every_world(fault, code):
    program, faults = programs.ring(2), script(**fault)
    assert play_simulated(program, faults) == code
    assert play_locally(program, faults)[0] == code
    may_die = (1,) if fault["kind"] == "kill" else ()
    timeout_s = 40.0 if may_die else 4.0  # a death is seen at once, what never comes is not
    answers = run_ranks(play, 2, program, faults, timeout_s, backend=None, may_die=may_die)
    its_code, where, _ = answers[0]
    assert its_code == code and where == "rank 1"
    if may_die:
        assert answers[1] == DIED


@pytest.mark.dist
@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "pause", "ranks": (1,), "at_label": "fold0", "duration_s": 0.4},
        {"kind": "partition", "ranks": (1,), "at_label": "recv1", "duration_s": 0.4},
        {"kind": "slow", "ranks": (1,), "at_step": 0, "duration_s": 9.0, "factor": 3.0},
    ],
    ids=["pause", "partition", "slow"],
)
def test_what_heals_changes_times_and_no_result(fault):
    program, faults = programs.ring(2), script(**fault)
    expected = undisturbed(program)
    assert play_simulated(program, faults) == ""
    code, local = play_locally(program, faults)
    answers = run_ranks(play, 2, program, faults, 40.0, backend=None)
    assert code == ""
    for rank, (its_code, _, result) in enumerate(answers):
        assert its_code == ""
        trace, tensor = result
        assert torch.equal(tensor, expected.contexts[rank].tensors[f"x:{rank}"])
        assert torch.equal(local.contexts[rank].tensors[f"x:{rank}"], tensor)
        assert trace.log(rank) == local.trace.log(rank)
        if fault["kind"] != "slow":
            assert trace.end_s >= 0.4 and local.trace.end_s >= 0.4


def twice(rank: int, world_size: int, faults: FaultScript):
    """Rank 0 sends once, rank 1 receives twice."""
    mesh = Mesh(pp=2)
    message = {"axis": "pp", "tensor": "x:0", "payload_bytes": programs.MESSAGE_BYTES}
    answer = {"axis": "pp", "tensor": "x:0", "payload_bytes": programs.MESSAGE_BYTES}
    first = [Compute(op="fill"), Send(**message, peer=1, label="send"), Recv(**answer, peer=1)]
    second = [Recv(**message, peer=0), Recv(**message, peer=0), Send(**answer, peer=0)]
    program = Program.by_axis(mesh, "pp", [first, second])
    if rank < 0:
        return play_locally(program, faults)[0], play_simulated(program, faults)
    world = DistWorld(mesh, programs.OPS, rank, current_store(), timeout_s=40.0)
    drive(FaultyWorld(world, faults), program=program)
    return world.tensors["x:0"].tolist()


@pytest.mark.dist
def test_a_duplicate_arrives_twice():
    faults = script(kind="duplicate", ranks=(0,), at_label="send")
    assert twice(-1, 2, faults) == ("", "")
    sent, got = run_ranks(twice, 2, faults, backend=None)
    assert sent == got


def test_impossible_faults_are_refused_at_once():
    local = LocalWorld(Mesh(dp=2), {})
    with pytest.raises(JobError, match="must lie in") as caught:
        FaultyWorld(local, script(kind="kill", ranks=(2,), at_step=0))
    assert caught.value.code == "mesh/rank"
    for fault in (
        {"kind": "slow", "factor": 0.5, "duration_s": 1.0},
        {"kind": "restart"},
    ):
        with pytest.raises(WorldError) as caught:
            FaultyWorld(local, script(**fault, ranks=(0,), at_step=0))
        assert caught.value.code == "world/unbound"


@pytest.mark.dist
def test_a_kill_at_a_time_strikes_in_the_middle_of_a_compute():
    program, faults = sleepy(), script(kind="kill", ranks=(1,), at_s=0.3)
    answers = run_ranks(play_sleepy, 2, program, faults, backend=None, may_die=(1,))
    assert answers[1] == DIED and answers[0] == ("world/dead", "rank 1")


def sleepy() -> Program:
    message = {"axis": "pp", "tensor": "x:1", "payload_bytes": programs.MESSAGE_BYTES}
    first = [Recv(**message, peer=1)]
    second = [Compute(op="sleep"), Send(**message, peer=0)]
    return Program.by_axis(Mesh(pp=2), "pp", [first, second])


def play_sleepy(rank: int, world_size: int, program: Program, faults: FaultScript):
    import time

    ops = {"sleep": lambda context, action: time.sleep(300.0)}
    world = DistWorld(program.mesh, ops, rank, current_store(), timeout_s=40.0)
    try:
        drive(FaultyWorld(world, faults), program=program)
    except PhalanxError as error:
        return error.code, error.where
    return "", ""
