"""From one set of layouts to another: who sends which slice to whom, in exact bytes.

`plan_reshard(source, target)` reads two tables {canonical name: Layout}. Every target box is cut
along the source's boxes; each piece is fetched once, from the receiver's own memory if it lies
there, else from a replica on the same host, else from the replica that has sent least so far.
`slice -> move -> slice` changes no bit. The two sides may live on the same ranks, on disjoint pools
or anything between; pools map mesh ranks to global ranks.

Who uses it, and how:

- Loading a checkpoint: source = the layouts of its manifest on a pool of shard files (a whole file
  is `Layout(shape, Mesh())`), target = the layouts of the run. Saving: the other way round.
- FSDP and TP, elastic restarts: the same tensors on the old and on the new mesh.
- Trainer to rollout: the two programs' layouts; on one device set (HybridFlow) mesh axes arranged
  so that each rank's generation slice contains its training slice leave only the missing part to
  move. Fused serving weights: `into` = `Fused.views`.
- Prefill to decode re-sharding (Seesaw): weights as above; KV as below, by way of a pool of one
  host rank where the host holds the whole.
- KV migration (Llumnix, disaggregated prefill): per layer one tensor [token, kv_head, channel],
  `Shard(1, "tp", units=kv_heads, rule="repeat")`, layers on stages by `Only("pp", stage)`; one plan
  per request length, since layers share it.
- Adapter merge: LoRA A and B from where they were trained to `project`ions of the base weight.
- Optimizer state: the parameters' layouts with the state's item size; factored state: `project`.

Tensors with equal item size and equal layouts share one transfer table by reference: a model of 126
equal layers costs as much as one of them. The size of a table is the number of target ranks times
the pieces that each fetches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np

from phalanx.errors import PlanError, nearest_names
from phalanx.layout import Box, Layout
from phalanx.layout.overlap import Slices, overlaps
from phalanx.layout.sources import Pools, tiers_of
from phalanx.units import format_bytes


class Transfer(NamedTuple):
    """One slice of one tensor on its way from one global rank to another or to itself."""

    tensor: str
    source: int
    target: int
    box: Box
    source_index: Box
    target_index: Box
    num_bytes: int


@dataclass(frozen=True, eq=False)
class Moves:
    """One transfer table and the tensors that it holds for.

    Attributes:
        tensors: canonical names.
        source_at, target_at: [transfers] mesh ranks in `source` and `target`.
        starts, stops: [transfers, dims] canonical boxes.
        num_bytes: [transfers] for each of the tensors.
    """

    tensors: tuple[str, ...]
    source: Layout
    target: Layout
    source_at: np.ndarray
    target_at: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    num_bytes: np.ndarray


@dataclass(frozen=True, eq=False)
class Reshard:
    """A planned change of layout.

    Attributes:
        moves: transfer tables; every tensor is in exactly one.
        source_ranks, target_ranks: [mesh ranks] global ranks of the two pools.
    """

    moves: tuple[Moves, ...]
    source_ranks: np.ndarray
    target_ranks: np.ndarray

    def __repr__(self) -> str:
        num_tensors = sum(len(moves.tensors) for moves in self.moves)
        return (
            f"Reshard({num_tensors} tensors, {len(self.source_ranks)} -> {len(self.target_ranks)}"
            f" ranks, {format_bytes(self.network_bytes)} between ranks,"
            f" {format_bytes(self.local_bytes)} stay)"
        )

    @cached_property
    def _links(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Source rank, target rank and bytes of every pair, a rank with itself included."""
        width = int(self.target_ranks.max(initial=0)) + 1
        codes, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for m in self.moves:
            codes.append(self.source_ranks[m.source_at] * width + self.target_ranks[m.target_at])
            sizes.append(m.num_bytes * len(m.tensors))
        pairs, at = np.unique(np.concatenate(codes), return_inverse=True)
        total = np.zeros(len(pairs), dtype=np.int64)
        np.add.at(total, at, np.concatenate(sizes))
        return pairs // width, pairs % width, total

    def _sum_by(self, end: np.ndarray, local: bool) -> dict[int, int]:
        source, target, num_bytes = self._links
        chosen = (source == target) == local
        ranks, at = np.unique(end[chosen], return_inverse=True)
        total = np.zeros(len(ranks), dtype=np.int64)
        np.add.at(total, at, num_bytes[chosen])
        return dict(zip(ranks.tolist(), total.tolist()))

    @cached_property
    def sent_bytes(self) -> dict[int, int]:
        """Bytes that each global rank sends to others; ranks that send nothing are absent."""
        return self._sum_by(self._links[0], local=False)

    @cached_property
    def received_bytes(self) -> dict[int, int]:
        """Bytes that each global rank receives from others."""
        return self._sum_by(self._links[1], local=False)

    @cached_property
    def kept_bytes(self) -> dict[int, int]:
        """Bytes that each global rank takes from its own memory."""
        return self._sum_by(self._links[1], local=True)

    @cached_property
    def link_bytes(self) -> dict[tuple[int, int], int]:
        """(source rank, target rank) -> bytes, for pairs of different ranks."""
        table = zip(*(column.tolist() for column in self._links))
        return {(source, target): size for source, target, size in table if source != target}

    @property
    def network_bytes(self) -> int:
        """Bytes between different ranks."""
        source, target, num_bytes = self._links
        return int(num_bytes[source != target].sum())

    @property
    def local_bytes(self) -> int:
        """Bytes that stay on their rank."""
        source, target, num_bytes = self._links
        return int(num_bytes[source == target].sum())

    def transfers(self, rank: int | None = None) -> Iterator[Transfer]:
        """All transfers, or those in which a global rank takes part; one order for all ranks.

        The order is global, so that ranks which walk through their own transfers with blocking
        sends and receives cannot deadlock.
        """
        for m in self.moves:
            source, target = self.source_ranks[m.source_at], self.target_ranks[m.target_at]
            rows = slice(None) if rank is None else (source == rank) | (target == rank)
            starts, stops = m.starts[rows], m.stops[rows]
            source_offset = m.source.bounds[0][m.source_at[rows]]
            target_offset = m.target.bounds[0][m.target_at[rows]]
            columns = zip(
                source[rows].tolist(),
                target[rows].tolist(),
                _boxes(starts, stops),
                _boxes(starts - source_offset, stops - source_offset),
                _boxes(starts - target_offset, stops - target_offset),
                m.num_bytes[rows].tolist(),
            )
            table = list(columns)
            for name in m.tensors:
                for row in table:
                    yield Transfer(name, *row)


def plan_reshard(
    source: Layout | Mapping[str, Layout],
    target: Layout | Mapping[str, Layout],
    itemsize: int | Mapping[str, int],
    *,
    source_ranks: Sequence[int] | None = None,
    target_ranks: Sequence[int] | None = None,
    host_of: Callable[[int], object] | None = None,
) -> Reshard:
    """Transfers that give every target rank its box of every target tensor.

    Args:
        source, target: canonical name -> layout. Source tensors that no target names stay behind.
        itemsize: bytes of an element, for all tensors or by name.
        source_ranks, target_ranks: global rank of each mesh rank; default: the mesh ranks.
        host_of: host of a global rank; sources on the receiver's host are then preferred.

    Raises:
        PlanError: `layout/mismatch` for a target that the source lacks or has in another shape,
            `mesh/product` and `mesh/rank` for ranks that do not fit the meshes.
    """
    if isinstance(target, Layout):
        name = target.name or (source.name if isinstance(source, Layout) else "") or "tensor"
        target = {name: target}
    if isinstance(source, Layout):
        source = dict.fromkeys(target, source)
    pools = Pools(
        _pool(source, source_ranks, "source_ranks"),
        _pool(target, target_ranks, "target_ranks"),
        host_of,
    )
    alike: dict[tuple[Layout, Layout, int], list[str]] = {}
    for name, to in target.items():
        size = itemsize if isinstance(itemsize, int) else itemsize.get(name)
        if size is None:
            raise PlanError("layout/mismatch", name, None, "has no item size")
        alike.setdefault((_counterpart(source, name, to), to, size), []).append(name)
    # the largest first, so that small tensors even out what the large ones left uneven
    largest = sorted(
        alike.items(), key=lambda item: -prod(item[0][1].shape) * item[0][2] * len(item[1])
    )
    moves = [m for key, names in largest for m in _plan_alike(names, *key, pools)]
    return Reshard(tuple(moves), pools.source_ranks, pools.target_ranks)


def apply_reshard(
    reshard: Reshard,
    shards: Mapping[int, Mapping[str, Any]],
    into: Mapping[int, Mapping[str, Any]],
) -> None:
    """Carry out all transfers in one process.

    Args:
        shards: global rank -> canonical name -> local array of the source.
        into: the same for the target, allocated; `Fused.views` are arrays too. Anything that reads
            (source) or writes (target) when indexed by a tuple of slices will do.
    """
    for t in reshard.transfers():
        into[t.target][t.tensor][t.target_index] = shards[t.source][t.tensor][t.source_index]


def allocate_shards(
    layouts: Mapping[str, Layout],
    new: Callable[[str, tuple[int, ...]], Any],
    ranks: Sequence[int] | None = None,
) -> dict[int, dict[str, Any]]:
    """Global rank -> canonical name -> `new(name, local shape)`, where a rank holds the tensor."""
    shards: dict[int, dict[str, Any]] = {}
    for at, rank in enumerate(_pool(layouts, ranks, "ranks").tolist()):
        shapes = {name: layout.local_shape(at) for name, layout in layouts.items()}
        shards[rank] = {n: new(n, shape) for n, shape in shapes.items() if shape is not None}
    return shards


def _plan_alike(
    names: list[str], source: Layout, target: Layout, itemsize: int, pools: Pools
) -> Iterator[Moves]:
    have, want = Slices(source), Slices(target)
    starts, stops, from_slice, to_slice = overlaps(have, want, source.shape)
    begin = np.searchsorted(want.number, to_slice, "left")
    copies = np.searchsorted(want.number, to_slice, "right") - begin
    piece = np.repeat(np.arange(len(begin)), copies)
    copy = np.arange(len(piece)) - np.repeat(np.cumsum(copies) - copies, copies)
    target_at = want.holders[begin[piece] + copy]
    starts, stops, wanted = starts[piece], stops[piece], from_slice[piece]
    num_bytes = (stops - starts).prod(axis=1) * itemsize
    own = pools.source_of_target[target_at]
    own = np.where((own >= 0) & (have.of_rank[own] == wanted), own, -1)
    tiers = tiers_of(have, wanted, num_bytes, own, target_at, pools)
    num_tables = min(len(names), max((tier.period for _, tier in tiers), default=1))
    for number in range(num_tables):
        share = tuple(names[number::num_tables])
        source_at = own.copy()
        for rows, tier in tiers:
            source_at[rows] = tier.choose(pools.load)
            np.add.at(pools.load, source_at[rows], num_bytes[rows] * len(share))
        yield Moves(share, source, target, source_at, target_at, starts, stops, num_bytes)


def _pool(layouts: Mapping[str, Layout], ranks: Sequence[int] | None, where: str) -> np.ndarray:
    sizes = {layout.mesh.size for layout in layouts.values()} or {0}
    pool = np.arange(max(sizes)) if ranks is None else np.array(ranks, dtype=np.int64)
    for name, layout in layouts.items():
        if layout.mesh.size != len(pool):
            rule = f"{name} is on {layout.mesh!r}, the pool has {len(pool)} ranks"
            raise PlanError("mesh/product", where, layout.mesh.size, rule, legal=[len(pool)])
    if len(np.unique(pool)) != len(pool) or pool.min(initial=0) < 0:
        rule = "must name each rank once, by a number >= 0"
        raise PlanError("mesh/rank", where, pool.tolist(), rule)
    return pool


def _counterpart(source: Mapping[str, Layout], name: str, target: Layout) -> Layout:
    if name not in source:
        rule = "the source has no such tensor"
        raise PlanError("layout/mismatch", name, None, rule, legal=nearest_names(name, source))
    if source[name].shape != target.shape:
        rule = "the source has another shape"
        legal = [source[name].shape]
        raise PlanError("layout/mismatch", name, target.shape, rule, legal=legal)
    return source[name]


def _boxes(starts: np.ndarray, stops: np.ndarray) -> list[Box]:
    return [tuple(map(slice, a, b)) for a, b in zip(starts.tolist(), stops.tolist())]
