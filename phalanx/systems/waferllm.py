"""WaferLLM."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="waferllm",
    title="WaferLLM",
    papers=(
        Source(
            "WaferLLM: Large Language Model Inference at Wafer Scale",
            "arXiv 2502.04563",
            "OSDI 2025",
        ),
    ),
    mechanism=(
        "Matrices are cut in both dimensions over a grid of small cores, and only algorithms with "
        "constant hops, memory and routes per step are used. Prefill is Cannon's multiplication "
        "on an interleaved ring whose neighbours are at most two hops away; decode is a local "
        "product and a tree reduction; cache entries shift between rows so that all rows stay "
        "equally full."
    ),
    policies=("tiles/mesh_gemm", "tiles/mesh_gemv"),
    code="github.com/MeshInfra/WaferLLM",
)
