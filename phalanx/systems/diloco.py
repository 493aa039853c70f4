"""DiLoCo."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="diloco",
    title="DiLoCo",
    papers=(
        Source(
            "DiLoCo: Distributed Low-Communication Training of Language Models",
            "arXiv 2311.08105",
            "Google DeepMind, ICML 2024 workshop",
        ),
    ),
    mechanism=(
        "Each island trains its own copy for H AdamW steps on its own shard without "
        "communicating; the displacement of its parameters is an outer gradient. The outer "
        "gradients are averaged and applied to the shared parameters with Nesterov momentum, and "
        "all islands continue from there: communication falls by H."
    ),
    policies=("sync/diloco",),
)
