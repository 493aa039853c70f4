"""How the parameters of a unit lie in flat tensors that are gathered and reduced as one.

As FSDP2 communicates them: dim 0 of every parameter is padded to equal shards, and a rank's part is
the concatenation of its shards. A gathered tensor is the parts in rank order, so gathering is a
plain concatenation, and reducing a plain split, of flat tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class FlatUnit:
    """The parameters of one unit.

    Attributes:
        shapes: parameter -> shape before it is sharded.
        num_shards: ranks over which dim 0 is split.
    """

    shapes: Mapping[str, tuple[int, ...]]
    num_shards: int

    @cached_property
    def _part_sizes(self) -> dict[str, int]:
        sizes = {}
        for name, shape in self.shapes.items():
            rows = ceil(shape[0] / self.num_shards)
            sizes[name] = rows * torch.Size(shape[1:]).numel()
        return sizes

    @property
    def part_size(self) -> int:
        """Elements of one rank's part."""
        return sum(self._part_sizes.values())

    @property
    def size(self) -> int:
        """Elements of the gathered tensor."""
        return self.part_size * self.num_shards

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The gathered flat tensor; padding is zero.

        Args:
            tensors: all parameters of the unit.
        """
        columns = []
        for name, shape in self.shapes.items():
            flat = tensors[name].reshape(-1)
            padding = self._part_sizes[name] * self.num_shards - flat.numel()
            assert tuple(tensors[name].shape) == shape
            columns.append(pad(flat, (0, padding)).view(self.num_shards, -1))
        return torch.cat(columns, dim=1).view(-1)

    def unpack(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters in a gathered flat tensor, without padding."""
        columns = flat.view(self.num_shards, -1).split(list(self._part_sizes.values()), dim=1)
        return {
            name: column.reshape(-1)[: torch.Size(shape).numel()].view(shape)
            for (name, shape), column in zip(self.shapes.items(), columns)
        }

    def part(self, flat: Tensor, rank: int) -> Tensor:
        """A view of one rank's part of a gathered flat tensor."""
        return flat.view(self.num_shards, -1)[rank]
