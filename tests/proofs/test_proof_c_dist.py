"""Proof c, real processes: the lowered step on gloo gives LocalWorld's bits and the same logs.

Groups have two members, so that a sum has one order only.
"""

from __future__ import annotations

import pytest
import torch

from phalanx.drive import drive
from phalanx.policies.data.fsdp import Fsdp
from phalanx.policies.data.replicate import Replicate
from phalanx.policies.tensor.megatron import Megatron
from phalanx.worlds.dist import DistWorld
from phalanx.worlds.local import LocalWorld
from tests.proofs.residual_toy import Case, issue_rows, make_step, make_toy
from tests.ranks import current_store, run_ranks

SEQUENCE = Megatron(sequence_parallel=True)
NUM_STEPS = 2
CASES = {
    "pp x shard": Case(axes={"pp": 2, "shard": 2}, specs=[Fsdp()], width=5),
    "shard x tp": Case(axes={"shard": 2, "tp": 2}, specs=[Fsdp(prefetch=2), Megatron()], width=5),
    "pp x tp": Case(axes={"pp": 2, "tp": 2}, specs=[SEQUENCE], schedule="gpipe"),
    "hybrid": Case(axes={"replicate": 2, "shard": 2}, specs=[Fsdp(), Replicate()], width=5),
    "cube": Case(axes={"pp": 2, "shard": 2, "tp": 2}, specs=[Fsdp(), SEQUENCE], width=5),
    "cube, reduced every item": Case(
        axes={"pp": 2, "shard": 2, "tp": 2},
        specs=[Fsdp(reduce_every_item=True, reshard_after_forward=False), Megatron()],
    ),
}


def play_rank(rank: int, world_size: int, name: str):
    case = CASES[name]
    toy = make_toy(case)
    step = make_step(case, toy)
    world = DistWorld(
        case.mesh, step.ops, rank, current_store(), dtype=torch.float64, timeout_s=30.0
    )
    step.place(world.context(rank), toy.parameters, toy.batches[case.replica(rank)])
    trace = drive(world, program=case.program, num_steps=NUM_STEPS)
    return issue_rows(trace, rank), trace.log(rank), world.tensors


def play_local(case: Case):
    toy = make_toy(case)
    step = make_step(case, toy)
    world = LocalWorld(case.mesh, step.ops, dtype=torch.float64)
    for rank, context in world.contexts.items():
        step.place(context, toy.parameters, toy.batches[case.replica(rank)])
    trace = drive(world, program=case.program, num_steps=NUM_STEPS)
    return trace, {rank: context.tensors for rank, context in world.contexts.items()}


@pytest.mark.dist
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", list(CASES))
def test_real_processes_give_the_bits_and_the_log_of_one(name):
    case = CASES[name]
    trace, expected = play_local(case)
    played = run_ranks(play_rank, case.mesh.size, name, backend=None)
    for rank, (rows, log, tensors) in enumerate(played):
        assert log == trace.log(rank)
        assert rows == issue_rows(trace, rank)
        assert tensors.keys() == expected[rank].keys()
        for handle, tensor in tensors.items():
            assert torch.equal(tensor.view(-1), expected[rank][handle].view(-1)), (rank, handle)
