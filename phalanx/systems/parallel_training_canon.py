"""Parallel training canon."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="parallel-training-canon",
    title="Parallel training canon",
    papers=(
        Source(
            "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
            "arXiv 2006.15704",
            "DDP",
        ),
        Source(
            "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
            "arXiv 1910.02054",
            "ZeRO stages 1-3",
        ),
        Source(
            "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
            "arXiv 1811.06965",
            "GPipe",
        ),
        Source(
            "Memory-Efficient Pipeline-Parallel DNN Training",
            "arXiv 2006.09503",
            "1F1B with flush, 2BW",
        ),
        Source("Zero Bubble Pipeline Parallelism", "arXiv 2401.10241", "split backward"),
        Source(
            "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long "
            "Sequence Transformer Models",
            "arXiv 2309.14509",
            "all-to-all sequence parallelism",
        ),
        Source(
            "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding",
            "arXiv 2006.16668",
            "expert parallelism",
        ),
    ),
    mechanism=(
        "Not one system but the classics that every other one builds on: data parallelism, ZeRO, "
        "pipelines, sequence and expert parallelism, memory saving, compressed communication, "
        "fault tolerance. Each needs a cost formula, an executable schedule and a real run that "
        "equals one process; the reading list that gave the name was not found, so the works are "
        "those that its categories imply."
    ),
    policies=(
        "data/replicate",
        "data/zero",
        "pipeline/gpipe",
        "pipeline/1f1b",
        "pipeline/zero_bubble",
        "pipeline/zbv",
        "pipeline/dualpipe_v",
        "context/ulysses",
        "context/ring",
        "expert/gshard",
    ),
    builds_on=("data/fsdp",),
    ran=(
        (
            "Per work, tests on two to four gloo processes against one process: DDP and "
            "ZeRO 1 to 3 (tests/engines), GPipe, 1F1B, zero bubble and ZB-V (tests/worlds), "
            "ring, Ulysses and USP (tests/ops, tests/engines), offloaded optimizer states "
            "to the bit (tests/engines)."
        ),
        'Not run: NCCL; the works named under "not reproduced" are not here.',
    ),
)
