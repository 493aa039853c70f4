"""ByteScale."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="bytescale",
    title="ByteScale",
    papers=(
        Source(
            "ByteScale: Efficient Scaling of LLM Training with a 2048K Context Length on More "
            "Than 12,000 GPUs",
            "arXiv 2502.21231",
            "Ge, Feng, Huang, Fu, Nie and others (Peking University, ByteDance Seed), 2025",
        ),
    ),
    mechanism=(
        "Data and context parallelism become one flat group in which each sequence takes exactly "
        "as many ranks as its length needs, from one to all, and short ones are packed so that "
        "ranks hold equal tokens. Long sequences offload activations to the host while they "
        "compute, which lowers the ranks that they need. Ranks may run different numbers of "
        "micro-batches, balanced by FLOPs, since the loss is normalised per token."
    ),
    policies=("balance/bytescale",),
    builds_on=("context/ring",),
)
