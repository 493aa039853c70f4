"""Several canonical tensors in one local tensor: fused qkv, gate_up, stacked experts.

A fused tensor has no canonical name and never travels: what is moved, saved and counted are its
parts. It only says where in local memory each part stands, as a view that can be read and written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from phalanx.errors import PlanError, nearest_numbers
from phalanx.layout.layout import Box, Layout
from phalanx.layout.placement import divisors


class PartBox(NamedTuple):
    """A box of a canonical tensor and where it stands in the fused local tensor."""

    tensor: str
    canonical: Box
    local: tuple[int | slice, ...]


@dataclass(frozen=True, init=False)
class Fused:
    """One local tensor made of the local slices of several canonical tensors.

    Args:
        parts: canonical name -> layout, in local order, all on one mesh.
        dim: along which the parts follow one another; None stacks equal parts along a new first
            dim, each rank those that it holds (experts).
        granules: None: one part after the other. Else the dim repeats granules[0] rows of the first
            part, granules[1] of the second, and so on: gate_up by rows is (1, 1), grouped qkv of
            one key-value head with its query heads is (H / K * C, C, C).

    Raises:
        PlanError: `layout/mismatch` for parts that do not fit together, `layout/divide` for a
            granule that does not divide its part on some rank.
    """

    parts: tuple[tuple[str, Layout], ...]
    dim: int | None
    granules: tuple[int, ...] | None

    def __init__(
        self,
        parts: Mapping[str, Layout],
        dim: int | None = 0,
        granules: Sequence[int] | None = None,
    ) -> None:
        object.__setattr__(self, "parts", tuple(parts.items()))
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "granules", None if granules is None else tuple(granules))
        self._require_fitting_shapes()
        if self.granules is not None:
            self._require_equal_groups(self.granules)

    def _sizes(self, layout: Layout) -> np.ndarray:
        starts, stops = layout.bounds
        return np.where(layout.held[:, None], stops - starts, 0)

    def _require_fitting_shapes(self) -> None:
        (first_name, first), *others = self.parts
        num_dims = len(first.shape)
        if self.dim is not None and not 0 <= self.dim < num_dims:
            rule = f"{first_name} of shape {first.shape} has no such dim"
            raise PlanError("layout/rank", "fused dim", self.dim, rule, legal=range(num_dims))
        for name, layout in others:
            rule = f"does not fit beside {first_name}: {first!r}"
            if layout.mesh != first.mesh or len(layout.shape) != num_dims:
                raise PlanError("layout/mismatch", name, layout, rule)
            if self.dim is None:
                both = layout.held & first.held
                fits = layout.shape == first.shape
            else:
                both = layout.held | first.held
                fits = bool((layout.held == first.held).all())
            rest = [d for d in range(num_dims) if d != self.dim]
            same = (self._sizes(layout) == self._sizes(first))[:, rest].all(axis=1)
            if not fits or not (same | ~both).all():
                raise PlanError("layout/mismatch", name, layout, rule)

    def _require_equal_groups(self, granules: tuple[int, ...]) -> None:
        if self.dim is None or len(granules) != len(self.parts) or min(granules) < 1:
            rule = f"needs a dim and one granule >= 1 for each of the {len(self.parts)} parts"
            raise PlanError("layout/mismatch", "granules", granules, rule)
        groups = None
        for (name, layout), granule in zip(self.parts, granules):
            rows = self._sizes(layout)[:, self.dim]
            if (rows % granule).any():
                torn = int(rows[rows % granule > 0][0])
                legal = nearest_numbers(granule, divisors(torn))
                rule = f"does not divide the {torn} rows that a rank holds"
                raise PlanError("layout/divide", f"granule of {name}", granule, rule, legal=legal)
            if groups is not None and not np.array_equal(groups, rows // granule):
                rule = f"gives another number of groups than {self.parts[0][0]}"
                raise PlanError("layout/mismatch", f"granule of {name}", granule, rule)
            groups = rows // granule

    def local_shape(self, rank: int) -> tuple[int, ...] | None:
        """Shape of the fused local tensor; None on a rank that holds no part."""
        shapes = [s for _, layout in self.parts if (s := layout.local_shape(rank)) is not None]
        if not shapes:
            return None
        if self.dim is None:
            return (len(shapes), *shapes[0])
        fused = list(shapes[0])
        fused[self.dim] = sum(shape[self.dim] for shape in shapes)
        return tuple(fused)

    def boxes(self, rank: int) -> tuple[PartBox, ...]:
        """Where each non-empty canonical box stands; several per part where granules tear it."""
        held = [(n, box) for n, layout in self.parts if (box := layout.box(rank)) is not None]
        if self.dim is None:
            return tuple(
                PartBox(name, box, (at, *_local(box)))
                for at, (name, box) in enumerate(held)
                if all(side.start < side.stop for side in box)
            )
        granules = self.granules or [box[self.dim].stop - box[self.dim].start for _, box in held]
        found: list[PartBox] = []
        for at, (name, box) in enumerate(held):
            if any(side.start == side.stop for side in box):
                continue
            first = box[self.dim].start
            size = box[self.dim].stop - first
            for run in _runs(sum(granules[:at]), granules[at], sum(granules), size):
                end = first + len(range(run.start, run.stop, run.step or 1))
                canonical = _replaced(box, self.dim, slice(first, end))
                found.append(PartBox(name, canonical, _replaced(_local(box), self.dim, run)))
                first = end
        return tuple(found)

    def views(self, rank: int, array: Any) -> dict[str, Any]:
        """The non-empty parts inside the rank's fused local array (numpy or torch).

        Each reads and writes `array` when indexed by slices in the part's local coordinates.
        """
        runs: dict[str, list[tuple[int | slice, ...]]] = {}
        for tensor, _, local in self.boxes(rank):
            runs.setdefault(tensor, []).append(local)
        return {
            name: array[places[0]] if len(places) == 1 else _TornView(array, self.dim or 0, places)
            for name, places in runs.items()
        }


class _TornView:
    """A part that stands in many runs of rows: no plain view, but slices read and write it."""

    def __init__(self, array: Any, dim: int, places: list[tuple[int | slice, ...]]) -> None:
        self._array, self._dim = array, dim
        sides = [place[dim] for place in places]
        self._rows = np.concatenate(
            [np.arange(side.start, side.stop) for side in sides if isinstance(side, slice)]
        )

    def _place(self, index: tuple[slice, ...]) -> tuple[Any, ...]:
        rows = self._rows[index[self._dim]]
        return (*index[: self._dim], rows, *index[self._dim + 1 :])

    def __getitem__(self, index: tuple[slice, ...]) -> Any:
        return self._array[self._place(index)]

    def __setitem__(self, index: tuple[slice, ...], value: Any) -> None:
        self._array[self._place(index)] = value


def _local(box: Box) -> Box:
    return tuple(slice(0, side.stop - side.start) for side in box)


def _replaced(box: Box, dim: int, side: slice) -> Box:
    return (*box[:dim], side, *box[dim + 1 :])


def _runs(offset: int, granule: int, period: int, size: int) -> list[slice]:
    """The rows offset..offset+granule of each period, `size` rows in all, as few slices."""
    if granule == 1:
        return [slice(offset, offset + (size - 1) * period + 1, period)]
    groups = range(offset, offset + size // granule * period, period)
    return [slice(first, first + granule) for first in groups]
