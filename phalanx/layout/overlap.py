"""How the boxes of two layouts of one tensor overlap."""

from __future__ import annotations

import numpy as np

from phalanx.layout.layout import Layout


class Slices:
    """The distinct non-empty boxes of a layout, a product of intervals per dim, numbered."""

    def __init__(self, layout: Layout) -> None:
        starts, stops = layout.bounds
        holders = np.flatnonzero(layout.held & (starts < stops).all(axis=1))
        number = np.zeros(len(holders), dtype=np.int64)
        self.firsts: list[np.ndarray] = []
        for dim in range(len(layout.shape)):
            firsts, at = np.unique(starts[holders, dim], return_inverse=True)
            self.firsts.append(firsts)
            number = number * len(firsts) + at
        order = np.argsort(number, kind="stable")
        self.holders, self.number = holders[order], number[order]
        self.of_rank = np.full(layout.mesh.size, -1)
        self.of_rank[self.holders] = self.number


def overlaps(
    have: Slices, want: Slices, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """All overlaps of a source slice with a target slice: starts, stops, slice numbers."""
    starts = np.zeros((1 if len(have.holders) else 0, 0), dtype=np.int64)
    stops, source, target = starts, np.zeros(len(starts), np.int64), np.zeros(len(starts), np.int64)
    for dim, size in enumerate(shape):
        a, b = have.firsts[dim], want.firsts[dim]
        cuts = np.union1d(a, b)
        ends = np.append(cuts[1:], size)[: len(cuts)]
        num = len(source)
        source = np.add.outer(source * len(a), np.searchsorted(a, cuts, "right") - 1).ravel()
        target = np.add.outer(target * len(b), np.searchsorted(b, cuts, "right") - 1).ravel()
        starts = np.column_stack((np.repeat(starts, len(cuts), axis=0), np.tile(cuts, num)))
        stops = np.column_stack((np.repeat(stops, len(cuts), axis=0), np.tile(ends, num)))
    return starts, stops, source, target
