"""xDiT."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="xdit",
    title="xDiT",
    papers=(
        Source(
            "xDiT: an Inference Engine for Diffusion Transformers (DiTs) with Massive Parallelism",
            "arXiv 2411.01738",
            "2024",
        ),
        Source(
            "PipeFusion: Patch-level Pipeline Parallelism for Diffusion Transformers Inference",
            "arXiv 2405.14430",
            "NeurIPS 2025",
        ),
        Source(
            "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI",
            "arXiv 2405.07719",
            "Ulysses inside, ring outside",
        ),
    ),
    mechanism=(
        "A diffusion transformer is served on one mesh of data, guidance, patch-pipeline, "
        "Ulysses, ring and tensor axes, the chatty ones inside the fast links. In PipeFusion "
        "patches flow through layer stages and attention uses the newest keys and values there "
        "are, possibly one denoising step old. The image decoder is split over patches with "
        "halos."
    ),
    policies=("denoise/pipefusion", "denoise/guidance"),
    builds_on=("context/ulysses", "context/ring"),
    code="github.com/xdit-project/xDiT",
)
