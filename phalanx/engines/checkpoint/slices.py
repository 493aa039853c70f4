"""Which slice of each tensor a rank holds, and which of the ranks that hold it writes it.

Legend: N slices, D dims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from phalanx.errors import PlanError


class Slice(NamedTuple):
    """A box of a canonical tensor: rows `offset[d]` to `offset[d] + shape[d]` of each dim d."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Its size; 1 for a scalar."""
        return prod(self.shape)

    def overlap(self, other: Slice) -> Slice | None:
        """What both hold; None: nothing."""
        first = tuple(map(max, self.offset, other.offset))
        ends = (o + n for o, n in zip(self.offset, self.shape))
        last = map(min, ends, (o + n for o, n in zip(other.offset, other.shape)))
        shape = tuple(end - start for start, end in zip(first, last))
        return None if any(size <= 0 for size in shape) else Slice(first, shape)

    def within(self, outer: Slice) -> tuple[slice, ...]:
        """The index of this slice in the tensor that holds `outer`."""
        starts = (mine - theirs for mine, theirs in zip(self.offset, outer.offset))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape))


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, sharing its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def slice_of(name: str, tensor: Tensor) -> Slice:
    """The slice that this process holds of a plain tensor (all) or a DTensor.

    The cuts of torch's strided shards (FSDP2 under tensor parallelism) come after those of the
    inner dims of the mesh, all others from the outermost dim on; each cuts as `torch.chunk`.

    Raises:
        PlanError: `layout/mismatch` for a placement whose cut is another.
    """
    if not isinstance(tensor, DTensor):
        return cut(tensor.shape, ())
    cuts = []
    for at in _order(tensor.placements):
        placed = tensor.placements[at]
        if not hasattr(placed, "dim"):
            rule = "is no slice of the tensor, so it cannot be stored"
            raise PlanError("layout/mismatch", name, str(placed), rule)
        mesh = tensor.device_mesh
        cuts.append((placed.dim, mesh.size(at), mesh.get_local_rank(at)))
    held = cut(tensor.shape, cuts)
    found = tuple(tensor.to_local().shape)
    if held.num_elements and found != held.shape:
        rule = f"is cut otherwise than by {tensor.placements}: expected {held.shape}"
        raise PlanError("layout/mismatch", name, found, rule)
    return held


def _order(placements: Sequence[Placement]) -> list[int]:
    """Mesh dims that cut, in the order in which they do."""
    cutting = [at for at, placed in enumerate(placements) if not placed.is_replicate()]
    plain = [at for at in cutting if isinstance(placements[at], Shard)]
    return plain + [at for at in reversed(cutting) if at not in plain]


def cut(shape: Sequence[int], cuts: Sequence[tuple[int, int, int]]) -> Slice:
    """What is left of a tensor after (dim, parts, index of mine) one after another."""
    offset, left = [0] * len(shape), list(shape)
    for dim, parts, index in cuts:
        width = -(-left[dim] // parts)
        first = min(index * width, left[dim])
        offset[dim] += first
        left[dim] = min(width, left[dim] - first)
    return Slice(tuple(offset), tuple(left))


def writers(held: Sequence[Mapping[str, Slice]], num_bytes: Mapping[str, int]) -> list[set[str]]:
    """The names whose slice each rank writes: every slice once, evenly by bytes.

    Args:
        held: by rank, what it holds.
        num_bytes: of one element of each tensor.
    """
    holders: dict[tuple[str, Slice], list[int]] = {}
    for rank, slices in enumerate(held):
        for name, each in slices.items():
            if each.num_elements:
                holders.setdefault((name, each), []).append(rank)
    load = [0] * len(held)
    mine: list[set[str]] = [set() for _ in held]

    def size(item: tuple[str, Slice]) -> int:
        return item[1].num_elements * num_bytes[item[0]]

    for item in sorted(holders, key=lambda item: (len(holders[item]), -size(item), item)):
        rank = min(holders[item], key=load.__getitem__)
        mine[rank].add(item[0])
        load[rank] += size(item)
    return mine


def require_whole(name: str, shape: Sequence[int], slices: Sequence[Slice]) -> None:
    """Raise `layout/mismatch` unless the slices are the whole tensor, every element once."""
    if not _is_whole(tuple(shape), tuple(slices)):
        rule = f"the slices of all ranks are not the whole tensor of shape {tuple(shape)} once"
        raise PlanError("layout/mismatch", name, [tuple(each) for each in slices], rule)


@lru_cache(maxsize=256)  # the layers of a model are cut alike
def _is_whole(shape: tuple[int, ...], slices: tuple[Slice, ...]) -> bool:
    if sum(each.num_elements for each in slices) != prod(shape):
        return False
    size_ND = len(slices), len(shape)
    starts_ND = np.array([each.offset for each in slices], dtype=np.int64).reshape(size_ND)
    ends_ND = starts_ND + np.array([each.shape for each in slices], dtype=np.int64).reshape(size_ND)
    meet_NN = np.ones((len(slices), len(slices)), dtype=bool)
    for dim in range(len(shape)):
        starts, ends = starts_ND[:, dim], ends_ND[:, dim]
        meet_NN &= (starts[:, None] < ends) & (starts < ends[:, None])
    return int(meet_NN.sum()) == len(slices)  # each meets itself only
