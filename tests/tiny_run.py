"""Data and a model that are small enough to train in a test, as files. Starts no process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from phalanx.data.tokenise import train_tokenizer
from phalanx.models.hf import save_folder
from phalanx.models.parameters import initial_values
from phalanx.models.spec import DecoderConfig, canonical_tensors, small_config

_WORDS = "alpha beta gamma delta epsilon zeta eta theta".split()


def write_pairs(path: Path, count: int = 90) -> Path:
    """Questions and answers of a few words that can be learnt, as JSON lines."""
    with path.open("w") as file:
        for index in range(count):
            answer = " ".join(_WORDS[(index * step) % 8] for step in range(1, 3 + index % 5))
            pair = {"prompt": f"number {index}?", "completion": f"{answer} {index}"}
            file.write(json.dumps(pair) + "\n")
    return path


def tiny_base(**sizes: Any) -> DecoderConfig:
    """Three layers of awkward sizes, in float32."""
    usual = {
        "vocab_size": 290,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_layers": 3,
        "num_heads": 3,
        "num_kv_heads": 1,
        "head_dim": 8,
        "window": 16,
        "dtype": "float32",
    }
    return small_config(**usual | sizes)


def write_base(folder: Path, **sizes: Any) -> Path:
    """A model folder as Hugging Face writes it, with drawn weights and a tokenizer."""
    tokenizer = train_tokenizer(["alpha beta gamma number 1 2 3"] * 3, 280, folder / "tokenizer")
    config = tiny_base(**sizes)
    values = initial_values(3, canonical_tensors(config).values())
    return save_folder(folder / "base", config, values, extras_from=tokenizer)
