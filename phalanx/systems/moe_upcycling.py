"""MoE upcycling."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="moe-upcycling",
    title="MoE upcycling",
    papers=(
        Source(
            "Llama 3 Meets MoE: Efficient Upcycling",
            "arXiv 2412.09952",
            "Vavre, He, Liu, Yan, Yang, Tajbakhsh, Aithal (UT Austin, NVIDIA), 2024",
        ),
        Source(
            "Upcycling Large Language Models into Mixture of Experts",
            "arXiv 2410.07524",
            "granular upcycling",
        ),
    ),
    mechanism=(
        "A dense checkpoint becomes a mixture of experts: each expert starts as a copy of the "
        "dense feed-forward, the router starts random, and choosing the top k before the softmax "
        "makes the first forward pass equal to the dense model. Each rank slices the dense "
        "checkpoint with its target layout and copies its own slice into its own experts, so no "
        "weight crosses ranks."
    ),
    modules=("models/upcycle",),
)
