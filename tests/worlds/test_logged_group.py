"""Every exchange is logged once, with its axis and exact bytes, whoever issued it.

B batch, D model, F feed-forward.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from phalanx.mesh import Mesh
from phalanx.worlds.comm_log import CommLog, last_collective
from phalanx.worlds.logged_group import _OPERATIONS, device_mesh
from tests.ranks import run_ranks

B, D, F = 6, 10, 14
FLOAT = 4


class Block(nn.Module):
    """Two matrices and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, F, bias=False), nn.Linear(F, D, bias=False)

    def forward(self, x_BD):
        return x_BD + self.down(torch.relu(self.up(x_BD)))


class Split(nn.Module):
    """The same with rows split over tp between blocks: gather in front, scatter behind."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, F, bias=False), nn.Linear(F, D, bias=False)

    def forward(self, x_BD):
        return self.down(torch.relu(self.up(x_BD)))


def tensor_parallel_block(mesh) -> nn.Module:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(Block(), mesh["tp"], plan)


def sequence_parallel_block(mesh) -> nn.Module:
    gather = PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Shard(0),))
    plan = {
        "": gather,
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0)),
    }
    return parallelize_module(Split(), mesh["tp"], plan)


def logged_step(log: CommLog, number: int, run) -> list[tuple[str, str, int]]:
    before = len(log.rows)
    with log.step(number):
        run()
    return log.seen()[before:]


def dtensor_steps(rank: int, world_size: int, sequence: bool, compiled: bool) -> list:
    mesh = device_mesh("cpu", Mesh(tp=world_size))
    block = sequence_parallel_block(mesh) if sequence else tensor_parallel_block(mesh)
    if compiled:
        block = torch.compile(block, fullgraph=True)
    log = CommLog(rank)

    def step() -> None:
        x_BD = torch.ones(B // (world_size if sequence else 1), D, requires_grad=True)
        block(x_BD).sum().backward()

    return [logged_step(log, number, step) for number in range(2)]


@pytest.mark.dist
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_tensor_parallel_block_reduces_output_and_input_gradient(compiled):
    both = run_ranks(dtensor_steps, 2, False, compiled, backend="logged_gloo")
    step = [("tp", "all_reduce", B * D * FLOAT)] * 2
    assert both == [[step, step]] * 2


@pytest.mark.dist
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_sequence_parallel_block_gathers_and_scatters_whole_activations(compiled):
    both = run_ranks(dtensor_steps, 2, True, compiled, backend="logged_gloo")
    whole = B * D * FLOAT
    gather, scatter = ("tp", "all_gather", whole), ("tp", "reduce_scatter", whole)
    step = [gather, scatter, gather, scatter]  # forward, then backward in mirror order
    assert both == [[step, step]] * 2


def fsdp_steps(rank: int, world_size: int, reshard: bool, compiled: bool) -> list:
    mesh = device_mesh("cpu", Mesh(shard=world_size))
    model = nn.Sequential(Block(), Block())
    for block in model:
        fully_shard(block, mesh=mesh["shard"], reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh["shard"], reshard_after_forward=reshard)
    if compiled:
        model = torch.compile(model)
    log = CommLog(rank)
    return [logged_step(log, n, lambda: model(torch.ones(B, D)).sum().backward()) for n in (0, 1)]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("reshard", "compiled"),
    [(False, False), (True, False), (True, True)],
    ids=["kept", "resharded", "compiled"],
)
def test_fsdp2_gathers_parameters_and_scatters_gradients(reshard, compiled):
    both = run_ranks(fsdp_steps, 2, reshard, compiled, backend="logged_gloo")
    whole = 2 * D * F * FLOAT
    gather, scatter = ("shard", "all_gather", whole), ("shard", "reduce_scatter", whole)
    if reshard:  # the second block is gathered again; prefetch brings the first one's forward
        step = [gather, gather, gather, gather, scatter, scatter]
    else:
        step = [gather, gather, scatter, scatter]
    assert both == [[step, step]] * 2


def pipeline_steps(rank: int, world_size: int, num_items: int) -> list:
    mesh = device_mesh("cpu", Mesh(pp=world_size))
    x_BD = torch.ones(B, D)
    item_BD = x_BD.chunk(num_items)[0].clone().requires_grad_()
    stage = PipelineStage(
        Block(), rank, world_size, torch.device("cpu"), group=mesh.get_group("pp"),
        input_args=(item_BD.detach().requires_grad_(rank > 0),), output_args=(item_BD,),
    )  # fmt: skip
    schedule = Schedule1F1B(stage, num_items, loss_fn=lambda y_BD, _: y_BD.sum())
    schedule.step(*([x_BD] if rank == 0 else []), target=x_BD)  # agrees on shapes
    log = CommLog(rank)

    def step() -> None:
        schedule.step(*([x_BD] if rank == 0 else []), target=x_BD)

    with log.step(0):
        step()
    return [(row.axis, row.kind, row.peer, row.payload_bytes) for row in log.rows]


@pytest.mark.dist
def test_pipelining_sends_each_item_once_each_way():
    first, second = run_ranks(pipeline_steps, 2, 3, backend="logged_gloo")
    item_bytes = B // 3 * D * FLOAT
    send, recv = ("pp", "send", 1, item_bytes), ("pp", "recv", 1, item_bytes)
    assert first == [send, send, recv, send, recv, recv]
    send, recv = ("pp", "send", 0, item_bytes), ("pp", "recv", 0, item_bytes)
    assert second == [recv, send, recv, send, recv, send]


def fsdp_and_tp_axes(rank: int, world_size: int) -> list:
    mesh = device_mesh("cpu", Mesh(shard=2, tp=2))
    block = tensor_parallel_block(mesh)
    fully_shard(block, mesh=mesh["shard"])
    log = CommLog(rank)
    return logged_step(log, 0, lambda: block(torch.ones(B, D)).sum().backward())


@pytest.mark.dist
def test_axes_of_a_composed_mesh_are_told_apart():
    rows = F // 2 + 1  # up has 7 rows after tp, which FSDP2 pads to 8
    half = (rows * D + D * F // 2) * FLOAT
    step = [
        ("shard", "all_gather", half),
        ("tp", "all_reduce", B * D * FLOAT),
        ("shard", "reduce_scatter", half),
    ]
    assert run_ranks(fsdp_and_tp_axes, 4, backend="logged_gloo") == [step] * 4


def every_public_function(rank: int, world_size: int) -> tuple[list, list, list]:
    group = device_mesh("cpu", Mesh(tp=world_size)).get_group("tp")
    log, ones = CommLog(rank), torch.ones(2 * world_size)
    parts = [torch.ones(2) for _ in range(world_size)]
    ranks_of_root = parts if rank == 0 else None
    with log.step(7):
        dist.all_reduce(ones, group=group)
        dist.all_gather(parts, torch.ones(2), group=group)
        dist.reduce_scatter(torch.ones(2), parts, group=group)
        all_to_all_single(ones, None, None, group).sum()
        dist.broadcast(ones, group=group, group_src=0)
        dist.scatter(torch.ones(2), ranks_of_root, group=group, group_src=0)
        dist.gather(torch.ones(2), ranks_of_root, group=group, group_dst=0)
        dist.reduce(ones, group=group, group_dst=0)
        dist.all_reduce_coalesced([ones, ones], group=group)
        dist.barrier(group=group)
    dist.all_reduce(ones, group=group)  # outside a step: not kept
    trace = log.trace("job")
    names = trace.log(rank)
    return log.seen(), names, trace.where(operator="all_reduce").column("wire_bytes").tolist()


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [1, 2])
def test_public_functions_have_one_payload_convention(world_size):
    both = run_ranks(every_public_function, world_size, backend="logged_gloo")
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
    kinds += ("scatter", "gather", "reduce")
    whole = 2 * world_size * FLOAT
    expected = [("tp", kind, whole) for kind in kinds]
    expected += [("tp", "all_reduce", 2 * whole), ("tp", "barrier", 0)]
    names = [("step", "step7")] + [(kind, f"tp#{n}") for n, (_, kind, _) in enumerate(expected)]
    wire = [2 * (world_size - 1) / world_size * payload for payload in (whole, 2 * whole)]
    assert both == [(expected, names, wire)] * world_size


def ring_message(rank: int, world_size: int) -> tuple[list, str]:
    group = device_mesh("cpu", Mesh(pp=world_size)).get_group("pp")
    log, out, into = CommLog(rank), torch.full((5,), float(rank)), torch.empty(5)
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    with log.step(0):
        works = [
            dist.isend(out, group=group, group_dst=after),
            dist.irecv(into, group=group, group_src=before),
        ]
        unfinished = last_collective()
        for work in works:
            work.wait()
    assert into[0] == before and unfinished.endswith("not seen to end")
    return log.trace().log(rank, ("send", "recv")), last_collective()


@pytest.mark.dist
def test_a_message_has_the_same_name_at_both_ends():
    (first, last), (second, _) = run_ranks(ring_message, 2, backend="logged_gloo")
    assert first == [("send", "pp:0>1#0"), ("recv", "pp:1>0#0")]
    assert second == [("send", "pp:1>0#0"), ("recv", "pp:0>1#0")]
    assert last == "recv pp:1>0#0, 20 bytes, done"


def waits_s(rank: int, world_size: int) -> list[float]:
    mesh = device_mesh("cpu", Mesh(shard=world_size, cp=1))
    joint = mesh["shard", "cp"]._flatten("both").get_group()
    groups = [dist.group.WORLD, mesh.get_group("shard"), joint, dist.new_group([0, 1])]
    groups.append(dist.new_group([0, 1], timeout=timedelta(seconds=5)))
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return [backend.options._timeout.total_seconds() for backend in backends]


@pytest.mark.dist
def test_groups_of_axes_wait_as_long_as_the_default_group_unless_they_say_so():
    """torch's own default is half an hour."""
    for world_s, *others, named_s in run_ranks(waits_s, 2, backend="logged_gloo"):
        assert world_s < 300 and set(others) == {world_s} and named_s == 5


def test_no_operation_of_a_process_group_escapes():
    administration = {
        *("BackendType", "abort", "bound_device_id", "boxed", "get_group_store", "group_desc"),
        *("group_name", "merge_remote_group", "monitored_barrier", "name", "rank", "set_timeout"),
        *("shutdown", "size", "split_group", "unbox", "use_pg_for_symm_mem_rendezvous"),
        *("CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL"),
    }
    public = {name for name in dir(ProcessGroup) if not name.startswith("_")}
    logged = {name for name in _OPERATIONS if not name.startswith("_")}
    assert public - administration == logged
