"""transformers + peft with torch's fully_shard on two processes, head at counted positions.

It is what accelerate's FSDP2 calls. accelerate itself turns FSDP on for accelerators only
(`PartialState` of 1.15: MULTI_GPU and the like, not MULTI_CPU), so it cannot be the peer on a CPU.
FSDP2 wants one dtype per unit: the adapters are bfloat16 here, not float32 as peft makes them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard

from peers.case import Case
from peers.transformers_peft import adapted_model, inputs_of, optimizer_of

NAME = "transformers + peft + fully_shard on 2 processes"
NUM_PROCESSES = 2


def build(case: Case) -> Callable[[int], None]:
    """A step: this process's rows, gradients summed by FSDP, clipping, update."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = adapted_model(case, autocast_adapters=False)
    causal = model.get_base_model()
    for layer in causal.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(causal, mesh=mesh, reshard_after_forward=False)
    optimizer = optimizer_of(model)

    def step(number: int) -> None:
        rows = case.own_rows(number)
        scale = dist.get_world_size() / case.num_counted(number)
        for at, row in enumerate(rows):
            causal.set_requires_gradient_sync(at == len(rows) - 1)
            counted_N = torch.from_numpy(row.counted_N)
            # the forward of the sharded module: its hooks gather the head
            logits_NV = causal(**inputs_of(row), use_cache=False, logits_to_keep=counted_N).logits[
                0
            ]
            targets_N = torch.from_numpy(row.targets_N)
            loss = torch.nn.functional.cross_entropy(logits_NV.float(), targets_N, reduction="sum")
            (loss * scale).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
