"""All ranks in one process: results as computed by hand, mistakes named."""

from __future__ import annotations

import pytest
import torch

from phalanx.action import Collective, Compute, Mark, Program, Recv, Send, Timer
from phalanx.drive import drive
from phalanx.errors import CheckError, JobError, PlanError, WorldError
from phalanx.mesh import Mesh
from phalanx.policy import React
from phalanx.worlds.local import LocalWorld
from tests.worlds import programs


def run(program: Program, num_steps: int = 1) -> LocalWorld:
    world = LocalWorld(program.mesh, programs.OPS)
    world.trace = drive(world, program=program, num_steps=num_steps)
    return world


def filled(rank: int, parts: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(parts * programs.N, generator=generator)


def test_ring_folds_in_the_rank_before():
    world = run(programs.ring(3, num_rounds=1))
    for rank in range(3):
        expected = 0.5 * filled(rank, 1) + filled((rank - 1) % 3, 1)
        assert torch.equal(world.contexts[rank].tensors[f"x:{rank}"], expected)


def test_pipeline_composes_its_stages():
    world = run(programs.pipeline(3))
    for item in range(3):
        expected = torch.sin(torch.sin(torch.full((programs.N,), 1.0 + item)) * 2.0) * 3.0
        assert torch.equal(world.contexts[1].tensors[f"act:1.{item}"], expected)
    assert world.contexts[0].tensors == {}  # each activation was freed once it was sent


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives_sum_gather_and_turn(size):
    world = run(programs.reduce(size))
    inputs = [filled(rank, size) for rank in range(size)]
    total = sum(inputs[1:], start=inputs[0].clone())
    for rank, context in world.contexts.items():
        assert torch.equal(context.tensors["full"], size * total**2)
        assert torch.equal(context.host["full"], context.tensors["full"])
        assert torch.equal(context.tensors["part"], total[: programs.N])  # broadcast from the first
        turned = torch.cat([each.chunk(size)[rank] for each in inputs])
        assert torch.equal(context.tensors["turned"], turned)


def test_trace_holds_every_action_in_order_of_issue():
    program = programs.reduce(2)
    trace = run(program, num_steps=2).trace
    names = [(action.operator, action.label) for action in program.of(0)]
    assert trace.source == "measured"
    assert trace.log(0) == names * 2 and trace.log(1) == names * 2
    reduced = trace.where(rank=1, step=2, operator="all_reduce")
    assert reduced.column("wire_bytes").tolist() == reduced.column("payload_bytes").tolist()
    assert (trace.column("dur_s") >= 0).all()


def test_a_lane_runs_in_order_and_after_joins_lanes():
    seen = []
    ops = {"note": lambda context, action: seen.append(action.label)}
    late = Compute(op="note", label="late", lane="a", after=("early",))
    actions = [late, Compute(op="note", label="last", lane="a"),
               Compute(op="note", label="early", lane="b")]  # fmt: skip
    mesh = Mesh(dp=1)
    drive(LocalWorld(mesh, ops), program=Program.alike(mesh, actions))
    assert seen == ["early", "late", "last"]


def one_action_error(*actions, mesh: Mesh | None = None) -> Exception:
    mesh = mesh or Mesh(pp=2)
    with pytest.raises((CheckError, JobError, PlanError, WorldError)) as caught:
        drive(LocalWorld(mesh, programs.OPS), program=Program.alike(mesh, actions))
    return caught.value


def test_mistakes_are_named_before_or_while_they_happen():
    send = {"axis": "pp", "tensor": "x", "payload_bytes": 4.0}
    error = one_action_error(Compute(op="fil"))
    assert error.code == "world/unbound" and error.legal[0] == "fill"
    error = one_action_error(Compute(op="fill", label="a", after=("b",)))
    assert error.code == "check/label"
    assert one_action_error(Send(**send, peer=2)).code == "mesh/rank"
    assert one_action_error(Send(**send | {"axis": "p"}, peer=1)).code == "mesh/axis"
    error = one_action_error(Recv(**send, peer=0, label="r", lane="recv"))
    assert error.code == "check/deadlock" and "rank 1: waits in recv r" in error.detail
    error = one_action_error(
        Compute(op="fill"), Collective(collective="all_reduce", axis="pp", tensor="x")
    )
    assert error.code == "world/size" and error.legal == ("0 bytes",)
    error = one_action_error(Collective(collective="all_reduce", axis="pp", tensor="y"))
    assert error.code == "world/unbound"


def test_a_program_for_another_mesh_is_refused():
    with pytest.raises(PlanError, match="another mesh") as caught:
        LocalWorld(Mesh(pp=4), programs.OPS).load(programs.pipeline())
    assert caught.value.code == "plan/illegal"


class Chain(React):
    """After each step: a decided compute, then a timer, then a commit."""

    def start(self, view):
        return []

    def on(self, state, events, view):
        actions = []
        for event in events:
            state.append((event.kind, event.label, event.item, dict(event.data), view.step))
            if event.kind == "step":
                label = f"vote{event.item}"
                actions.append(Compute(op="vote", label=label, item=event.item, ranks=(1,)))
            elif event.kind == "done":
                actions.append(Timer(delay_s=0.001, label=f"timer{event.item}", item=event.item))
            elif event.kind == "timer" and event.rank == 0:
                actions.append(Mark(name="commit", value=event.item))
        self.log = state
        return actions


def test_policies_hear_of_steps_decided_actions_and_timers():
    mesh, policy = Mesh(dp=2), Chain()
    ops = programs.OPS | {"vote": lambda context, action: {"yes": context.rank == 1}}
    program = Program.alike(mesh, [Compute(op="fill")])
    world = LocalWorld(mesh, ops)
    drive(world, program=program, num_steps=2, reacts=[policy])
    kinds = [(kind, item) for kind, _, item, _, _ in policy.log]
    assert kinds.count(("step", 1)) == kinds.count(("step", 2)) == 1
    assert ("done", "vote1", 1, {"yes": True}, 0) in policy.log
    assert kinds[0] == ("start", -1) and kinds.count(("timer", 2)) == 2  # one per rank
    assert world.view("job").step == 2
