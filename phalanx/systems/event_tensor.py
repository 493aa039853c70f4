"""Event Tensor."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="event-tensor",
    title="Event Tensor",
    papers=(
        Source(
            "Event Tensor: A Unified Abstraction for Compiling Dynamic Megakernel",
            "arXiv 2604.13327",
            "CMU, NVIDIA and others, MLSys 2026",
        ),
    ),
    mechanism=(
        "The tiles of many operators run in one launch and wait for one another through tensors "
        "of counters: a producer decrements, and the one that reaches zero releases the "
        "consumers. Counter shapes may be symbolic and edges may read run-time tensors, so one "
        "compiled graph serves all batch sizes and expert routings, by fixed queues per worker or "
        "by a ready queue."
    ),
    policies=("tiles/event_tensor",),
)
