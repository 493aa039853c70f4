"""One canonical tensor on one mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np

from phalanx.errors import PlanError
from phalanx.layout.placement import Only, Placement, Shard, cut
from phalanx.mesh import Mesh

Box = tuple[slice, ...]  # indexes an array directly; one slice per dim


class Placed(NamedTuple):
    """A box of the canonical tensor and where it stands in the local one."""

    canonical: Box
    local: Box


@dataclass(frozen=True, init=False, repr=False)
class Layout:
    """Which box of a tensor of `shape` each rank of `mesh` holds.

    Ranks here are mesh ranks; which processes they are is said where two layouts meet.

    Args:
        shape: of the canonical tensor; `()` and sizes of 0 are legal.
        placements: `Shard`s in the order in which they cut, and `Only`s; the rest replicates.
        name: of the tensor, for errors only: equal layouts of different tensors are equal.

    Raises:
        PlanError: `layout/rank` for a dim that the tensor has not, `layout/axis` for an axis used
            twice, `layout/divide` for what cannot be cut so.
        JobError: `mesh/axis`, `mesh/rank` for an axis or coordinate that the mesh has not.
    """

    shape: tuple[int, ...]
    mesh: Mesh
    placements: tuple[Placement, ...]
    name: str = field(compare=False)

    def __init__(
        self, shape: Sequence[int], mesh: Mesh, *placements: Placement, name: str = ""
    ) -> None:
        object.__setattr__(self, "shape", tuple(shape))
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "placements", placements)
        object.__setattr__(self, "name", name)
        self._require_legal_axes()
        _ = self.bounds  # raises what the cuts find

    def __repr__(self) -> str:
        return f"Layout({', '.join(map(repr, (self.shape, self.mesh, *self.placements)))})"

    def _require_legal_axes(self) -> None:
        where = self.name or "layout"
        seen: set[str] = set()
        for placement in self.placements:
            axes = placement.axes if isinstance(placement, Shard) else (placement.axis,)
            for axis in axes:
                self.mesh.require_axis(axis, where)
                if axis in seen:
                    raise PlanError(
                        "layout/axis", where, axis, "an axis can be placed only once per layout"
                    )
                seen.add(axis)
            if isinstance(placement, Only):
                for at in placement.at:
                    self.mesh.rank({placement.axis: at})
            elif not 0 <= placement.dim < len(self.shape):
                rule = f"a tensor of shape {self.shape} has no such dim"
                legal = range(len(self.shape))
                raise PlanError("layout/rank", f"{where} dim", placement.dim, rule, legal=legal)

    @cached_property
    def _coordinates(self) -> dict[str, np.ndarray]:
        ranks = np.arange(self.mesh.size)
        names = self.mesh.names
        return dict(zip(names, np.unravel_index(ranks, self.mesh.sizes))) if names else {}

    @cached_property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """First row and end of what each mesh rank holds: two arrays [ranks, dims].

        A rank that holds nothing has an empty range in some dim or is not in `held`.
        """
        num_ranks = self.mesh.size
        starts = np.zeros((num_ranks, len(self.shape)), dtype=np.int64)
        stops = np.tile(np.array(self.shape, dtype=np.int64), (num_ranks, 1))
        for shard in self.placements:
            if not isinstance(shard, Shard):
                continue
            dim, index, degree = shard.dim, np.zeros(num_ranks, dtype=np.int64), 1
            for axis in shard.axes:
                index = index * self.mesh.degree(axis) + self._coordinates[axis]
                degree *= self.mesh.degree(axis)
            where = f"{self.name or 'layout'} dim {dim} over {'+'.join(shard.axes)}"
            pair = starts[:, dim], stops[:, dim]
            starts[:, dim], stops[:, dim] = cut(shard, self.shape[dim], *pair, index, degree, where)
        return starts, stops

    @cached_property
    def held(self) -> np.ndarray:
        """[ranks] True where the `Only`s let a rank hold its box (which may be empty)."""
        mask = np.ones(self.mesh.size, dtype=bool)
        for only in self.placements:
            if isinstance(only, Only):
                mask &= np.isin(self._coordinates[only.axis], only.at)
        return mask

    def box(self, rank: int) -> Box | None:
        """The canonical box of a mesh rank; None where an `Only` excludes it."""
        self.mesh.coordinates(rank)  # raises for a rank outside
        if not self.held[rank]:
            return None
        starts, stops = self.bounds
        return tuple(map(slice, starts[rank].tolist(), stops[rank].tolist()))

    def boxes(self, rank: int) -> tuple[Placed, ...]:
        """What a mesh rank holds: one canonical box with its local one, or nothing."""
        box = self.box(rank)
        if box is None or any(side.start == side.stop for side in box):
            return ()
        return (Placed(box, tuple(slice(0, side.stop - side.start) for side in box)),)

    def local_shape(self, rank: int) -> tuple[int, ...] | None:
        """Shape of the local tensor, with zeros where the rule leaves it empty; None: no tensor."""
        box = self.box(rank)
        return None if box is None else tuple(side.stop - side.start for side in box)

    @cached_property
    def padded_shape(self) -> tuple[int, ...]:
        """The largest local shape: what each rank contributes to an equal-sized all-gather."""
        starts, stops = self.bounds
        return tuple((stops - starts).max(axis=0).tolist())

    def num_bytes(self, rank: int, itemsize: int) -> int:
        """Bytes of the local tensor, without padding."""
        shape = self.local_shape(rank)
        return 0 if shape is None else prod(shape) * itemsize

    def owners(self, box: Box | None = None) -> dict[int, Box]:
        """Mesh ranks that hold an element of a canonical box, each with its part of it."""
        starts, stops = self.bounds
        if box is not None:
            sides = [side.indices(size)[:2] for side, size in zip(box, self.shape)]
            first, end = np.array(sides, dtype=np.int64).reshape(-1, 2).T
            starts, stops = np.maximum(starts, first), np.minimum(stops, end)
        ranks = np.flatnonzero(self.held & (starts < stops).all(axis=1)).tolist()
        return {r: tuple(map(slice, starts[r].tolist(), stops[r].tolist())) for r in ranks}

    def take(self, whole: Any, rank: int) -> Any:
        """The rank's slice of a whole array (numpy or torch); None where it holds none."""
        box = self.box(rank)
        return None if box is None else whole[box]

    def project(self, shape: Sequence[int], dims: Sequence[int | None], name: str = "") -> Layout:
        """The layout of a tensor whose dims accompany dims of this one.

        With W [out, in]: bias `project((out,), (0,))`, LoRA A `project((r, in), (None, 1))`,
        B `project((out, r), (0, None))`, block scales `project((out / 128, in / 128), (0, 1))`.

        Args:
            shape: of the new tensor.
            dims: for each of its dims the dim of this tensor that it follows, or None.

        Raises:
            PlanError: `layout/mismatch` where a dim has another size and the cuts of the followed
                one are not by `units` that it also has.
        """
        followed = {dim: new for new, dim in enumerate(dims) if dim is not None}
        kept: list[Placement] = [p for p in self.placements if isinstance(p, Only)]
        for shard in self.placements:
            if not isinstance(shard, Shard) or shard.dim not in followed:
                continue
            new = followed[shard.dim]
            if shape[new] != self.shape[shard.dim] and shard.units is None:
                rule = f"has to be the {self.shape[shard.dim]} of dim {shard.dim}, cut by rows"
                where = f"{name or 'projection'} dim {new}"
                raise PlanError("layout/mismatch", where, shape[new], rule)
            kept.append(Shard(new, *shard.axes, units=shard.units, rule=shard.rule))
        return Layout(shape, self.mesh, *kept, name=name)

    def to_dict(self) -> dict[str, Any]:
        """JSON form, for plans and checkpoint manifests."""
        placements = [
            {"dim": p.dim, "axes": list(p.axes), "units": p.units, "rule": p.rule}
            if isinstance(p, Shard)
            else {"axis": p.axis, "at": list(p.at)}
            for p in self.placements
        ]
        mesh = self.mesh.to_dict()
        return {"shape": list(self.shape), "mesh": mesh, "placements": placements}

    @classmethod
    def from_dict(cls, form: dict[str, Any], name: str = "") -> Layout:
        """The layout of which `form` is the `to_dict`."""
        placements = [
            Shard(p["dim"], *p["axes"], units=p["units"], rule=p["rule"])
            if "dim" in p
            else Only(p["axis"], *p["at"])
            for p in cast("list[dict[str, Any]]", form["placements"])
        ]
        return cls(form["shape"], Mesh(form["mesh"]), *placements, name=name)
