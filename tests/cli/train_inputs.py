"""A tiny model folder and data that trains in a second, for tests of `phalanx train`."""

from __future__ import annotations

import json
from pathlib import Path

from phalanx.data.tokenise import train_tokenizer
from phalanx.models.hf import save_folder
from phalanx.models.parameters import initial_values
from phalanx.models.spec import canonical_tensors, small_config

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


def write_pairs(path: Path, count: int = 90) -> Path:
    """Questions and answers that can be learned."""
    names = "alpha beta gamma delta epsilon zeta eta theta".split()
    with path.open("w") as file:
        for index in range(count):
            answer = " ".join(names[(index * step) % 8] for step in range(1, 3 + index % 5))
            pair = {"prompt": f"number {index}?", "completion": f"{answer} {index}"}
            file.write(json.dumps(pair) + "\n")
    return path


def write_model(folder: Path) -> Path:
    """A model folder as Hugging Face writes it, with drawn weights."""
    tokenizer = train_tokenizer(["alpha beta gamma number 1 2 3"] * 3, 280, folder / "tokenizer")
    config = small_config(
        vocab_size=290,
        hidden_size=24,
        intermediate_size=40,
        num_layers=3,
        num_heads=3,
        num_kv_heads=1,
        head_dim=8,
        window=16,
        dtype="float32",
    )
    values = initial_values(3, canonical_tensors(config).values())
    return save_folder(folder / "base", config, values, extras_from=tokenizer)
