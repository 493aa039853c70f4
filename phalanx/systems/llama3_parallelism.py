"""Llama 3 parallelism."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="llama3-parallelism",
    title="Llama 3 parallelism",
    papers=(
        Source(
            "Scaling Llama 3 Training with Efficient Parallelism Strategies",
            "DOI 10.1145/3695053.3731410",
            "W. Chu, X. Xie, J. Yu, J. Wang and others (Meta), ISCA'25",
        ),
        Source("The Llama 3 Herd of Models", "arXiv 2407.21783", "section 3.3 and Table 4"),
    ),
    mechanism=(
        "Four axes are nested by how much they talk, TP inside CP inside PP inside FSDP, and "
        "sized from a fixed budget of tokens per step. Its interleaved 1F1B takes any number of "
        "micro-batches and any round length, first and last pipeline ranks hold fewer layers, and "
        "context parallelism gathers keys and values so that document masks stay simple."
    ),
    policies=("context/all_gather",),
    builds_on=("data/fsdp", "tensor/megatron", "pipeline/interleaved"),
    modules=("planner/sizing",),
    ran=(
        "Arrays: orders of 4 and 16 ranks with rounds of any length (this page).",
        (
            "Two to four gloo processes on CPUs: interleaved rounds on torch's runtime to "
            "the bit, gathered context parallelism with document masks, ZeRO 1 and 2 by the "
            "rounds of the order, slow-rank search on a real slow rank (tests/engines, "
            "tests/analyze)."
        ),
        "Not run: 16,384 GPUs; the multimodal encoder.",
    ),
)
