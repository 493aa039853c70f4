"""X-MoE."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="x-moe",
    title="X-MoE",
    papers=(
        Source(
            "X-MoE: Enabling Scalable Training for Emerging Mixture-of-Experts Architectures "
            "on HPC Platforms",
            "arXiv 2508.13337",
            "Yuan, Gupta, Li, Dash, Wang, Zhang (UIUC, Oak Ridge), SC 2025",
        ),
    ),
    mechanism=(
        "For many narrow experts the dispatch buffers are the memory: tokens travel without "
        "padding in uneven all-to-alls, sorted by expert. One pilot copy of a token crosses to "
        "each node and is replicated there, and inside the expert blocks the sequence is sharded "
        "over the tensor-parallel ranks."
    ),
    policies=("expert/x_moe",),
    code="github.com/Supercomputing-System-AI-Lab/X-MoE",
)
