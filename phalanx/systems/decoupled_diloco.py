"""Decoupled DiLoCo."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="decoupled-diloco",
    title="Decoupled DiLoCo",
    papers=(
        Source(
            "Decoupled DiLoCo for Resilient Distributed Pre-training",
            "arXiv 2604.21428",
            "Google DeepMind, Google Research, 2026",
        ),
    ),
    mechanism=(
        "Islands train at their own pace while a light syncer on CPUs holds the global fragments "
        "and merges what has arrived once a quorum is there, plus a grace period that fits into "
        "the slack of the overlap. Contributions are weighted by tokens and by tokens per step, "
        "and directions and norms are averaged apart. A dead or slow island simply has weight "
        "zero in that merge and later copies the state of a peer."
    ),
    policies=("sync/decoupled",),
    builds_on=("sync/streaming",),
)
