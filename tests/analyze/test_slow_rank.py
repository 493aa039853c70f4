"""The rank that others wait for is found from outer axes to inner ones, simulated and measured."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from phalanx.action import Action, Collective, Compute, Program
from phalanx.analyze.slow_rank import find_slow, least_waiting
from phalanx.analyze.waiting import waiting
from phalanx.cli import main
from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.errors import JobError, PlanError
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.policies.pipeline.gpipe import GPipe
from phalanx.policies.pipeline.one_f_one_b import OneFOneB
from phalanx.policy import Order
from phalanx.trace import Trace, TraceBuilder, merge
from phalanx.workload import toy_work
from phalanx.worlds.comm_log import CommLog
from phalanx.worlds.faults import Fault, FaultScript
from phalanx.worlds.logged_group import device_mesh
from phalanx.worlds.sim import SimWorld
from tests.ranks import run_ranks

LAYERS = 3


def transformer(mesh: Mesh) -> Program:
    """Layers whose attention gathers keys along cp and whose products are summed along tp, and a
    gradient that is summed along replicate."""
    actions: list[Action] = []

    def exchange(kind: str, axis: str) -> None:
        after, label = (actions[-1].label,), f"{axis}{len(actions)}"
        actions.append(
            Collective(collective=kind, axis=axis, lane=f"axis:{axis}", label=label, after=after)
        )

    def compute() -> None:
        after = (actions[-1].label,) if actions else ()
        actions.append(Compute(op="layer", label=f"op{len(actions)}", after=after))

    for _ in range(LAYERS):
        compute()
        exchange("all_gather", "cp")
        compute()
        exchange("all_reduce", "tp")
    if "replicate" in mesh.names:
        exchange("all_reduce", "replicate")
    return Program.alike(mesh, actions)


def played(mesh: Mesh, slow: tuple[int, ...], factor: float = 1.3) -> Trace:
    cost = TableCost({"layer": 10.0, "all_gather": 1.0, "all_reduce": 1.0})
    faults = FaultScript(
        (Fault(kind="slow", ranks=slow, at_s=0.0, duration_s=float("inf"), factor=factor),)
        if slow
        else ()
    )
    return drive(SimWorld(mesh, cost, faults=faults), program=transformer(mesh))


def test_a_tensor_group_alone_blames_the_context_peer_and_the_search_finds_the_culprit():
    """Chu et al., section 6.1: cp 2, tp 4, rank 6 takes 1.3 times as long."""
    mesh = Mesh(cp=2, tp=4)
    trace = played(mesh, (6,))
    assert least_waiting(trace, mesh, "tp", 2) == 2
    found = find_slow(trace, mesh)
    assert found.suspects == (6,)
    assert [(level.axis, level.late) for level in found.levels] == [("cp", 1), ("tp", 2)]
    assert found.cost_s > 0.0 and found.step_s == trace.end_s


@pytest.mark.parametrize("slow", range(16))
def test_any_slow_rank_of_three_axes_is_found(slow):
    mesh = Mesh(replicate=2, cp=2, tp=4)
    assert find_slow(played(mesh, (slow,)), mesh).suspects == (slow,)


@pytest.mark.parametrize("slow", range(4))
@pytest.mark.parametrize("source", ["simulated", "measured"])
def test_waits_along_a_joint_axis_speak_of_each_of_its_parts(slow, source):
    """FSDP beside context parallelism sums gradients over shard and cp at once: "shard_cp"."""
    mesh, builder = Mesh(shard=2, cp=2), TraceBuilder(source)
    for rank in range(mesh.size):
        late_s = 3.0 * (rank == slow)
        about = {"rank": rank, "axis": "shard_cp", "lane": "axis:shard_cp"}
        if source == "measured":
            builder.add(**about, operator="wait", dur_s=1.0 + 3.0 - late_s)
        else:
            builder.add(rank=rank, operator="layer", lane="compute", dur_s=10.0 + late_s)
            builder.add(**about, operator="reduce_scatter", start_s=13.0, dur_s=1.0)
    found = find_slow(builder.build(), mesh)
    assert found.suspects == (slow,) and found.cost_s == 3.0


def test_the_order_of_the_mesh_does_not_matter():
    mesh = Mesh(tp=4, cp=2)
    slow = mesh.rank({"cp": 1, "tp": 2})
    assert find_slow(played(mesh, (slow,)), mesh).suspects == (slow,)


def test_a_slow_group_is_told_as_a_group():
    mesh = Mesh(cp=2, tp=4)
    found = find_slow(played(mesh, (4, 5, 6, 7)), mesh)
    assert found.suspects == (4, 5, 6, 7)
    assert [level.late for level in found.levels] == [1, -1]


def test_where_all_are_alike_nobody_is_blamed():
    mesh = Mesh(cp=2, tp=4)
    found = find_slow(played(mesh, ()), mesh)
    assert found.suspects == () and found.cost_s == 0.0
    assert not waiting(played(mesh, ()), mesh).waits_s.any()


def pipeline(order: Order, slow: int | None, *, send_s: float, num_steps: int = 1) -> Trace:
    """Four equal stages, eight micro-batches of 1 s forward and 2 s backward."""
    program = lower(toy_work(4, (4,) * 8), STAGES, order, grain="stage")
    cost = TableCost({"stage.F": 1.0, "stage.B": 2.0, "send": send_s, "optimizer": 0.0})
    whole = {"at_s": 0.0, "duration_s": float("inf"), "factor": 1.3}
    faults = () if slow is None else (Fault(kind="slow", ranks=(slow,), **whole),)
    world = SimWorld(STAGES, cost, faults=FaultScript(faults))
    return drive(world, program=program, num_steps=num_steps)


STAGES = Mesh(pp=4)
ORDERS = {"1f1b": OneFOneB(), "gpipe": GPipe()}


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_stages_of_an_even_pipeline_wait_for_its_bubble_alone_and_none_is_blamed(order, num_steps):
    trace = pipeline(ORDERS[order], None, send_s=0.0, num_steps=num_steps)
    waits_s = waiting(trace, STAGES).waits_s
    assert waits_s.tolist() == [[[(4 - 1) * (1.0 + 2.0)] * 4]] * num_steps
    assert find_slow(trace, STAGES).suspects == ()


@pytest.mark.parametrize("send_s", [0.0, 0.1])
@pytest.mark.parametrize("slow", range(4))
@pytest.mark.parametrize("order", ORDERS)
def test_a_slow_stage_is_found_whatever_its_place(order, slow, send_s):
    trace = pipeline(ORDERS[order], slow, send_s=send_s, num_steps=2)
    assert find_slow(trace, STAGES).suspects == (slow,)


def test_a_collective_that_a_rank_never_waited_for_does_not_shift_the_others():
    mesh = Mesh(cp=2)
    builder = TraceBuilder("measured")
    for rank, name, held_s in ((0, "a", 9.0), (0, "b", 5.0), (1, "b", 2.0), (0, "c", 1.0)):
        about = {"rank": rank, "operator": "wait", "axis": "cp", "lane": "axis:cp"}
        builder.add(**about, action_id=f"cp#{name}", dur_s=held_s)
    assert waiting(builder.build(), mesh).waits_s.tolist() == [[[5.0 - 2.0, 0.0]]]


def test_waits_of_a_rank_are_what_the_others_took_longer():
    mesh = Mesh(cp=2)
    builder = TraceBuilder("measured")
    for rank, held_s in ((0, 5.0), (1, 2.0)):  # two of the seconds are the exchange's own
        builder.add(rank=rank, operator="wait", axis="cp", lane="axis:cp", dur_s=held_s)
    assert waiting(builder.build(), mesh).waits_s.tolist() == [[[3.0, 0.0]]]


def test_a_trace_without_exchanges_and_a_mesh_too_small_are_told():
    builder = TraceBuilder("measured")
    builder.add(rank=3, operator="forward", lane="compute", dur_s=1.0)
    with pytest.raises(PlanError, match="profile_steps") as caught:
        find_slow(builder.build(), Mesh(cp=2, tp=2))
    assert caught.value.code == "trace/rows"
    with pytest.raises(PlanError, match="rank 3"):
        find_slow(builder.build(), Mesh(cp=2))
    with pytest.raises(JobError, match="cp"):
        find_slow(builder.build(), Mesh(cp=4), ["tq"])


def steps(rank: int, world_size: int, slow: int) -> Trace:
    """Real exchanges of four processes; one of them sleeps in each step."""
    mesh = device_mesh("cpu", Mesh(cp=2, tp=2))
    log, x, whole = CommLog(rank), torch.ones(64), torch.empty(128)
    dist.barrier()
    for number in range(6):
        with log.step(number):
            for layer in range(2):
                if layer == 0 and rank == slow:
                    time.sleep(0.02)
                dist.all_gather_single(whole, x, group=mesh.get_group("cp"))
                work = dist.all_reduce(x, group=mesh.get_group("tp"), async_op=True)
                work.wait()
    builder = TraceBuilder("measured", "sleeper")
    builder.extend(log.trace_rows())
    builder.extend(log.wait_rows())
    return builder.build()


@pytest.mark.dist
def test_one_of_four_processes_that_sleeps_20_ms_a_step_is_found(tmp_path, capsys):
    trace = merge(run_ranks(steps, 4, 3, backend="logged_gloo"))
    found = find_slow(trace, Mesh(cp=2, tp=2))
    assert found.suspects == (3,) and found.num_steps == 6
    assert 0.015 < found.cost_s < 0.06
    trace.save(tmp_path / "trace.npz")
    words = ["trace", "slow", str(tmp_path / "trace.npz"), "--mesh", "cp=2,tp=2"]
    assert main([*words, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["suspects"] == [3]
    assert main(words) == 0
    assert "slow: rank 3 (cp 1, tp 1)" in capsys.readouterr().out
    assert np.all(trace.where(operator="wait").columns["dur_s"] >= 0.0)


def test_a_run_that_is_none_and_a_mesh_with_an_axis_twice_are_told(tmp_path, capsys):
    played(Mesh(cp=2, tp=4), ()).save(tmp_path / "t.npz")
    for words, told in (
        ([str(tmp_path / "missing")], "is neither a run folder nor a trace file"),
        ([str(tmp_path)], "holds no run (no job.json)"),
        ([str(tmp_path / "t.npz"), "--mesh", "tp=4,tp=2"], "has the axis tp twice"),
    ):
        assert main(["trace", "slow", *words]) == 2
        assert told in capsys.readouterr().err


def test_an_axis_that_is_named_twice_counts_once():
    mesh = Mesh(cp=2, tp=4)
    found = find_slow(played(mesh, (6,)), mesh, ["cp", "cp", "tp"])
    assert found.suspects == (6,) and len(found.levels) == 2


def test_a_trace_file_needs_its_mesh(tmp_path, capsys):
    played(Mesh(cp=2, tp=4), (6,)).save(tmp_path / "t.npz")
    assert main(["trace", "slow", str(tmp_path / "t.npz")]) == 2
    assert "--mesh cp=2,tp=4" in capsys.readouterr().err
    assert main(["trace", "slow", str(tmp_path / "t.npz"), "--mesh", "cp=2,tp=4"]) == 0
    assert "slow: rank 6 (cp 1, tp 2)" in capsys.readouterr().out
