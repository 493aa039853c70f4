"""Eager updates for DiLoCo."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="eager-diloco",
    title="Eager updates for DiLoCo",
    papers=(
        Source(
            "Eager Updates For Overlapped Communication and Computation in DiLoCo",
            "arXiv 2502.12996",
            "Kale, Douillard, Donchev (Google), 2025",
        ),
    ),
    mechanism=(
        "The outer exchange may last a whole round: at the end of a round each island applies its "
        "own fresh outer gradient at once, with its share of the mean, together with the others' "
        "gradients of the previous round. Every contribution is applied exactly once, one part "
        "early and the rest one round late."
    ),
    policies=("sync/eager",),
    builds_on=("sync/streaming",),
)
