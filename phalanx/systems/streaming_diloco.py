"""Streaming DiLoCo."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="streaming-diloco",
    title="Streaming DiLoCo",
    papers=(
        Source(
            "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch",
            "arXiv 2501.18512",
            "Google DeepMind, Google Research, 2025",
        ),
    ),
    mechanism=(
        "The model is cut into fragments that are exchanged one at a time, staggered over the H "
        "local steps: the same bytes, with the peak divided by the number of fragments. Nobody "
        "waits: the exchange starts at a step, training goes on for tau steps, then the outer "
        "update is blended with what the fragment has become. Outer gradients travel in 4 bits."
    ),
    policies=("sync/streaming",),
    builds_on=("sync/diloco",),
)
