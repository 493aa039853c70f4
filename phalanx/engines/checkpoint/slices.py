"""Which slice of each tensor a rank holds, and which of the ranks that hold it writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

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
        return Slice((0,) * tensor.dim(), tuple(tensor.shape))
    offset, shape = [0] * tensor.dim(), list(tensor.shape)
    cuts = [
        (isinstance(placed, Shard), at if isinstance(placed, Shard) else -at, at, placed)
        for at, placed in enumerate(tensor.placements)
        if not placed.is_replicate()
    ]
    for *_, at, placed in sorted(cuts, key=lambda cut: (not cut[0], cut[1])):
        if not (placed.is_shard() or hasattr(placed, "split_factor")):
            rule = "is no slice of the tensor, so it cannot be stored"
            raise PlanError("layout/mismatch", name, str(placed), rule)
        dim, parts = placed.dim, tensor.device_mesh.size(at)
        width = -(-shape[dim] // parts)
        first = min(tensor.device_mesh.get_local_rank(at) * width, shape[dim])
        offset[dim] += first
        shape[dim] = min(width, shape[dim] - first)
    held = Slice(tuple(offset), tuple(shape))
    if held.num_elements and tuple(tensor.to_local().shape) != held.shape:
        rule = f"is cut otherwise than by {tensor.placements}: expected {held.shape}"
        raise PlanError("layout/mismatch", name, tuple(tensor.to_local().shape), rule)
    return held


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
    total = sum(each.num_elements for each in slices)
    doubled = any(
        a.overlap(b) for at, a in enumerate(slices) for b in slices[:at] if a.shape and b.shape
    )
    if total != prod(shape) or doubled:
        rule = f"the slices of all ranks are not the whole tensor of shape {tuple(shape)} once"
        raise PlanError("layout/mismatch", name, [tuple(each) for each in slices], rule)
