"""Flags of a training run that takes seconds, for tests of `phalanx train`."""

from __future__ import annotations

FLAGS = {
    "model.dtype": "float32",
    "data.held_out_frac": 0.2,
    "data.max_tokens": 96,
    "train.lora_rank": 3,
    "train.steps": 40,
    "train.warmup_steps": 1,
    "train.global_batch_tokens": 300,
}


def words(flags: dict | None = None) -> list[str]:
    """Flags of a command line."""
    return [
        word for key, value in (FLAGS | (flags or {})).items() for word in (f"--{key}", str(value))
    ]
