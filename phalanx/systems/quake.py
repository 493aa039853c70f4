"""Quake."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="quake",
    title="Quake",
    papers=(Source("Quake: Adaptive Indexing for Vector Search", "arXiv 2506.03437", "OSDI 2025"),),
    mechanism=(
        "A partitioned nearest-neighbour index watches sizes and hit rates of its partitions, "
        "predicts what a split or a deletion would save with a measured latency curve, acts, and "
        "undoes what did not pay. Each query scans partitions until a geometric estimate says "
        "that the recall target is met; partitions are pinned to the cores that scan them."
    ),
    policies=("place/quake",),
    modules=("stores/vector_index",),
    code="github.com/marius-team/quake",
)
