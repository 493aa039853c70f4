"""Seesaw."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="seesaw",
    title="Seesaw",
    papers=(
        Source(
            "Seesaw: High-throughput LLM Inference via Model Re-sharding",
            "arXiv 2503.06433",
            "MLSys 2025",
        ),
    ),
    mechanism=(
        "Offline serving with two layouts on the same devices: pipeline-heavy for prefill, "
        "tensor-heavy for decode. Caches of many prefilled requests wait in host memory and the "
        "layout changes only when that buffer is full or empty; copies out run under prefill and "
        "copies in are prefetched."
    ),
    policies=("serve/seesaw",),
)
