"""Megatron-LM."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="megatron-lm",
    title="Megatron-LM",
    papers=(
        Source(
            "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
            "arXiv 1909.08053",
            "Shoeybi and others, 2019",
        ),
        Source(
            "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
            "arXiv 2104.04473",
            "Narayanan and others, SC'21",
        ),
        Source(
            "Reducing Activation Recomputation in Large Transformer Models",
            "arXiv 2205.05198",
            "Korthikanti and others, MLSys'23",
        ),
    ),
    mechanism=(
        "Attention and MLP are split over heads and features so that each needs one all-reduce "
        "per pass; splitting the sequence between them turns each all-reduce into a "
        "reduce-scatter and an all-gather of the same volume. Layers are pipelined with several "
        "chunks per rank, which divides the bubble by their number, and only the attention core "
        "is recomputed."
    ),
    policies=("tensor/megatron", "pipeline/interleaved"),
    builds_on=("pipeline/1f1b",),
    code="github.com/NVIDIA/Megatron-LM",
    ran=(
        (
            "Two and four gloo processes on CPUs: tensor and sequence parallelism with a "
            "split vocabulary, interleaved pipelines, and both with data parallelism, equal "
            "to one process (tests/engines, tests/worlds)."
        ),
        (
            "Counts and bytes of collectives: the real log equals the lowered step "
            "(tests/engines/test_tensor_traced.py)."
        ),
        (
            "Not run: NCCL, so what overlap of exchange and product gains is not known; expert "
            "parallelism neither."
        ),
    ),
)
