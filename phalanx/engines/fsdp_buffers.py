"""Buffers that `fully_shard` reduces gradients in, on the CPU. Wraps private parts of torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from phalanx.engines.memory import make_room


class RoomyReduceScatter(DefaultReduceScatter):
    """torch's own reduction, whose buffers find room."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An empty tensor, once what the backward pass has freed is given back."""
        make_room(prod(int(each) for each in size) * dtype.itemsize)
        return super().allocate(size, dtype=dtype, device=device)


def make_room_for_reductions(unit: FSDPModule) -> None:
    """Let the gradients of a unit on the CPU be reduced in such buffers."""
    unit.set_custom_reduce_scatter(RoomyReduceScatter())
