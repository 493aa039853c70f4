"""Small decoders whose stages several ranks hold, and the same whole: what follows a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from phalanx.engines.optim import ShardedAdamW
from phalanx.engines.process import Process
from phalanx.engines.trainer_model import TrainModel
from phalanx.models.spec import LoraSpec, small_config
from phalanx.worlds.logged_group import init_logged
from tests.engines.pipeline_cases import StagedCase, build_staged
from tests.engines.tensor_cases import CLIP, DECAY, MEGATRON, SEQUENCE, cpu_process
from tests.ranks import current_store

TIED = small_config(
    vocab_size=37, hidden_size=24, intermediate_size=20, num_layers=5, num_heads=4, num_kv_heads=2,
    head_dim=6, window=4, full_every=2, init_std=0.3, dtype="float32",
)  # fmt: skip
WHOLE = StagedCase(config=TIED, mesh={"pp": 1})
ADAPTERS = LoraSpec(rank=3, alpha=7.0)
HANAYO = {"name": "hanayo", "waves": 1}
STAGED = {
    "two stages": replace(WHOLE, mesh={"pp": 2}, stages=[[0, 2], [2, 5]]),
    "two rounds": replace(WHOLE, mesh={"pp": 2}, order={"name": "interleaved", "virtual": 2}),
    "a wave": replace(WHOLE, mesh={"pp": 2}, order=HANAYO),
}
SPLIT = replace(WHOLE, mesh={"pp": 2, "tp": 2}, specs=(SEQUENCE,), order=HANAYO)
SHARED = replace(WHOLE, mesh={"pp": 2, "cp": 2}, specs=({"family": "context", "name": "ring"},))
CUT = replace(WHOLE, mesh={"tp": 2}, specs=(MEGATRON,))
ZERO = replace(WHOLE, mesh={"shard": 2}, specs=({"family": "data", "name": "zero", "stage": 2},))


def join(rank: int, world_size: int) -> None:
    """The process group of a call of `run_ranks` without a backend."""
    init_logged("gloo", dist.PrefixStore("logged", current_store()), rank, world_size)


def built(rank: int, world_size: int, case: StagedCase) -> tuple[TrainModel, ShardedAdamW, Process]:
    model = build_staged(rank, world_size, case)
    stages = model.stages
    optimizer = ShardedAdamW(
        model.data.named_held(model.decoder.named_parameters()),
        weight_decay=DECAY,
        clip_norm=CLIP,
        group=stages.group if stages else None,
        counted_elsewhere=stages.tied if stages else (),
    )
    return model, optimizer, cpu_process(rank, world_size, case)


def drawn(name: str, whole: torch.Tensor) -> torch.Tensor:
    """Values that depend on the name alone."""
    seed = sum(at * ord(letter) for at, letter in enumerate(name, 1))
    return torch.randn(whole.shape, generator=torch.Generator().manual_seed(seed)).to(whole.dtype)


def set_gradients(model: TrainModel, optimizer: ShardedAdamW) -> None:
    """A gradient for every trained weight, as if it had been summed over all ranks."""
    for name, parameter in optimizer.named_parameters.items():
        value = drawn(name, parameter)
        parameter.grad = placed_as(parameter, value)


def placed_as(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    if not hasattr(parameter, "placements"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def state_of(optimizer: ShardedAdamW) -> dict[str, Any]:
    """What this rank has of weights, moments and counts, each whole."""
    named = dict(optimizer.named_parameters)
    for kind, tensors in optimizer.state_dict().items():
        named |= {f"{kind}.{name}": each for name, each in tensors.items()}
    values = {name: each.detach() for name, each in named.items()}
    return {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).clone()
        for name, each in values.items()
    }
