"""A module of awkward shapes on any mesh, for tests of checkpoints."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from phalanx.engines.optim import ShardedAdamW
from phalanx.engines.process import Process
from phalanx.mesh import Mesh
from phalanx.worlds.logged_group import device_mesh

JOB = {"train": {"lr": 0.01, "steps": 8}, "model": {"name": "awkward"}}


class Awkward(nn.Module):
    """Two products whose sizes no mesh divides, a vector, a frozen matrix, a row for one rank."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)  # comes from elsewhere, always the same
        torch.manual_seed(seed)
        self.embed = nn.Embedding(31, 6)
        self.up = nn.Linear(6, 10, bias=False)
        self.down = nn.Linear(10, 6)
        self.scale = nn.Parameter(torch.randn(1, 6))

    def forward(self, x_S):
        hidden_SD = self.embed(x_S)
        hidden_SD = self.frozen(hidden_SD + self.down(self.up(hidden_SD).sin()))
        return (hidden_SD * self.scale).square().mean()


def awkward_run(rank, world_size, mesh, seed):
    """(model, optimizer, process) on a mesh with axes among replicate, shard and tp."""
    grid = device_mesh("cpu", Mesh(mesh))
    module = Awkward(seed).double()
    if "tp" in mesh:
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel(), "embed": RowwiseParallel()}
        parallelize_module(module, grid["tp"], styles, src_data_rank=None)
    axes = tuple(axis for axis in ("replicate", "shard") if axis in mesh)
    if axes:
        fully_shard(module.embed, mesh=grid[axes])
        fully_shard(module, mesh=grid[axes])
    optimizer = ShardedAdamW(module.named_parameters(), weight_decay=0.1, clip_norm=1.0)
    process = Process(rank, world_size, torch.device("cpu"), grid)
    data = SimpleNamespace(finish_update=lambda: None)  # weights are updated where they are held
    return SimpleNamespace(decoder=module, data=data), optimizer, process


def train_steps(model, optimizer, steps):
    """The same rows on all ranks, so that every mesh computes alike; the losses."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        loss = model.decoder(torch.randint(31, (5,), generator=generator))
        loss.backward()
        optimizer.step(0.01)
        losses.append(float(loss.detach()))
    return losses


def whole_state(optimizer):
    """Every weight, moment and count, whole, by name."""
    named = {f"weight.{name}": each for name, each in optimizer.named_parameters.items()}
    for kind, tensors in optimizer.state_dict().items():
        named |= {f"{kind}.{name}": each for name, each in tensors.items()}
    values = {name: each.detach() for name, each in named.items()}
    return {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).clone()
        for name, each in values.items()
    }
