"""Gemma 4 31B on TPU and GPU."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="gemma4-tpu",
    title="Gemma 4 31B on TPU and GPU",
    papers=(
        Source(
            "Fine-Tuning and Serving Gemma 4 31B on Google Cloud TPU: A Technical Comparison "
            "with GPU Baselines",
            "arXiv 2605.25645",
            "Kishnani, Goyel, Singh, Agrawal (H2LooP AI), 2026",
        ),
    ),
    mechanism=(
        "A case study: one LoRA tuning job and one serving job of a model with two kinds of "
        "attention layers, run on an fsdp x tp mesh of TPUs and on two GPUs, compared in hours "
        "and dollars. It needs layouts made legal per tensor (rank, divisibility, replicated KV "
        "heads), checkpoints converted and adapters merged across layouts, and a cache cost per "
        "layer kind."
    ),
    policies=("serve/prefill_first",),
    builds_on=("data/fsdp", "tensor/megatron"),
    modules=("models/families/gemma4", "layout/legalise", "cost/serving", "cost/money"),
)
