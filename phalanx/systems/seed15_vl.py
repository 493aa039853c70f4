"""Seed1.5-VL."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="seed15-vl",
    title="Seed1.5-VL",
    papers=(
        Source(
            "Seed1.5-VL Technical Report",
            "arXiv 2505.07062",
            "ByteDance Seed, 2025; sections 2, 3.2, 3.3, 5",
        ),
    ),
    mechanism=(
        "A small vision encoder and a large mixture-of-experts decoder share devices under "
        "different plans: sharded data parallelism for the encoder, four axes for the decoder. "
        "Images are redistributed by FLOPs inside groups of ranks, encoded, and the features are "
        "sent back to the ranks that hold their sequences."
    ),
    policies=("balance/encoder_images",),
    builds_on=("data/fsdp",),
    modules=("models/vision_language",),
)
