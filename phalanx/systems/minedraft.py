"""MineDraft."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="minedraft",
    title="MineDraft",
    papers=(
        Source(
            "MineDraft: A Framework for Batch Parallel Speculative Decoding",
            "arXiv 2603.18016",
            "ICML 2026",
        ),
    ),
    mechanism=(
        "Two batches of requests take turns: while one is verified on the target's devices the "
        "other is drafted on a device of its own, then they swap. A step takes the longer of "
        "drafting and verifying instead of their sum, and the output is that of ordinary "
        "speculative decoding."
    ),
    policies=("speculate/minedraft",),
    code="github.com/electron-shaders/MineDraft",
)
