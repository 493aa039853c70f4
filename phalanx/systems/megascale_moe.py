"""MegaScale-MoE."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="megascale-moe",
    title="MegaScale-MoE",
    papers=(
        Source(
            "MegaScale-MoE: Large-Scale Communication-Efficient Training of "
            "Mixture-of-Experts Models in Production",
            "arXiv 2505.11432",
            "Jin, Jiang, Bai and others (ByteDance Seed, Peking University), EuroSys 2026, "
            "DOI 10.1145/3767295.3769325",
        ),
    ),
    mechanism=(
        "A mixture-of-experts layer never leaves its node: attention is sequence-parallel by "
        "all-to-all, the experts are spread over the node's ranks, pipelines run between nodes. "
        "What communication remains hides under a hand-ordered sequence of the layer's operators; "
        "memory is bought by recomputing what overlaps; gradients travel once in bf16 and are "
        "summed in fp32."
    ),
    policies=("expert/megascale",),
    builds_on=("context/ulysses",),
)
