"""Device grids with named axes.

An `axis` is a direction of the grid ("tp"); a `dim` is a dimension of a tensor (0). They are never
confused in Phalanx: names and errors keep to it. The first axis is the outermost: its coordinate
changes slowest with the rank. Axes may stand in any order (Megatron puts tp fastest, Llama 3 puts
the data axis slowest). Several axes taken together are one joint axis under their names, in the
order of the mesh: "shard_cp" are the ranks that differ on shard or cp.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from math import prod

from phalanx.errors import JobError, nearest_names, nearest_numbers


class Mesh:
    """An immutable grid of ranks: `Mesh(pp=2, shard=2, tp=2)` has 8, tp fastest.

    Args:
        axes: axis name -> size, outermost first. Sizes of 1 are legal and stay visible.

    Raises:
        JobError: `mesh/axis` for a name that is no identifier or a size below 1.
    """

    def __init__(self, axes: Mapping[str, int] | None = None, /, **named: int) -> None:
        table = dict(axes or {}) | named
        for name, size in table.items():
            if not name.isidentifier():
                raise JobError(
                    "mesh/axis", "mesh", repr(name), "an axis name must be an identifier"
                )
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise JobError(
                    "mesh/axis", f"mesh.{name}", size, "must be a whole number >= 1", legal=[1]
                )
        self.names: tuple[str, ...] = tuple(table)
        self.sizes: tuple[int, ...] = tuple(table.values())
        self.size: int = prod(self.sizes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and (self.names, self.sizes) == (other.names, other.sizes)

    def __hash__(self) -> int:
        return hash((self.names, self.sizes))

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{n}={s}' for n, s in zip(self.names, self.sizes))})"

    def to_dict(self) -> dict[str, int]:
        """Axis name -> size, outermost first."""
        return dict(zip(self.names, self.sizes))

    @cached_property
    def _stride(self) -> dict[str, int]:
        strides, step = {}, 1
        for name, size in zip(reversed(self.names), reversed(self.sizes)):
            strides[name] = step
            step *= size
        return strides

    def parts(self, axis: str) -> tuple[str, ...]:
        """The axes that a joint axis joins; the axis itself; () for one that the mesh lacks."""
        if axis in self.names:
            return (axis,)
        return self._joint.get(axis, ())

    @cached_property
    def _joint(self) -> dict[str, tuple[str, ...]]:
        counts = range(2, len(self.names) + 1)
        joint = (axes for count in counts for axes in combinations(self.names, count))
        return {"_".join(axes): axes for axes in joint}

    def joint(self, axes: Collection[str]) -> str:
        """One name for the ranks that differ on any of these axes, those of size 1 left out; of
        axes that are all of size 1, or missing, the first."""
        long = [name for name in self.names if name in axes and self.degree(name) > 1]
        return "_".join(long) or next(iter(axes))

    def degree(self, axis: str) -> int:
        """Size of an axis; 1 for an axis that the mesh does not have, as for one of size 1."""
        if axis in self.names:
            return self.sizes[self.names.index(axis)]
        return prod(self.degree(part) for part in self.parts(axis))

    def coordinate(self, rank: int, axis: str) -> int:
        """Where `rank` stands on `axis` (0 on an axis that the mesh does not have)."""
        self._require_rank(rank)
        at = 0
        for part in self.parts(axis):
            degree = self.degree(part)
            at = at * degree + rank // self._stride[part] % degree
        return at

    def coordinates(self, rank: int) -> dict[str, int]:
        """All coordinates of a rank."""
        self._require_rank(rank)
        return {
            name: rank // self._stride[name] % size for name, size in zip(self.names, self.sizes)
        }

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these coordinates; absent axes count as 0.

        Raises:
            JobError: `mesh/axis` for an unknown axis, `mesh/rank` for a coordinate outside.
        """
        total = 0
        for axis, at in coordinates.items():
            self.require_axis(axis)
            if not 0 <= at < self.degree(axis):
                raise JobError(
                    "mesh/rank", f"coordinate {axis}", at, f"must lie in 0..{self.degree(axis) - 1}"
                )
            total += at * self._stride[axis]
        return total

    def peer(self, rank: int, axis: str, at: int) -> int:
        """The rank that differs from `rank` only in standing at `at` on `axis`."""
        return rank + (at - self.coordinate(rank, axis)) * self._stride.get(axis, 0)

    def group(self, rank: int, axes: str | Sequence[str]) -> tuple[int, ...]:
        """The ranks that share all other coordinates with `rank`, in the order of `axes`."""
        ranks = [rank]
        for axis in self.parts(axes) if isinstance(axes, str) else axes:
            ranks = [self.peer(r, axis, at) for r in ranks for at in range(self.degree(axis))]
        return tuple(ranks)

    def groups(self, axes: str | Sequence[str]) -> Iterator[tuple[int, ...]]:
        """All groups of an axis, each once, by their lowest rank."""
        seen: set[int] = set()
        for rank in range(self.size):
            if rank not in seen:
                members = self.group(rank, axes)
                seen.update(members)
                yield members

    def without(self, *axes: str) -> Mesh:
        """The mesh that remains when these axes are taken out."""
        return Mesh({name: size for name, size in zip(self.names, self.sizes) if name not in axes})

    def require_axis(self, axis: str, where: str = "axis") -> None:
        """Raise `mesh/axis` with the nearest names unless the mesh has `axis`."""
        if not self.parts(axis):
            raise JobError(
                "mesh/axis",
                where,
                repr(axis),
                f"{self!r} has no such axis",
                legal=nearest_names(axis, self.names),
            )

    def require_devices(self, num_devices: int, where: str = "mesh") -> None:
        """Raise `mesh/product` with near shapes unless the axes multiply to `num_devices`."""
        if self.size == num_devices:
            return
        rule = f"axis sizes multiply to {self.size}, not to the {num_devices} devices"
        raise JobError("mesh/product", where, self, rule, legal=self._nearest_shapes(num_devices))

    def _nearest_shapes(self, num_devices: int) -> list[Mesh]:
        shapes = []
        for axis, size in reversed(list(zip(self.names, self.sizes))):
            rest = self.size // size
            if num_devices % rest == 0:
                shapes.append(Mesh(self.to_dict() | {axis: num_devices // rest}))
        if not shapes and self.names:
            axis = self.names[-1]
            divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
            near = nearest_numbers(self.degree(axis), divisors)
            other = "shard" if axis == "replicate" else "replicate"
            shapes = [Mesh({other: num_devices // int(n), axis: int(n)}) for n in near]
        return shapes[:3]

    def _require_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise JobError("mesh/rank", "rank", rank, f"must lie in 0..{self.size - 1} of {self!r}")
