"""Sizes that a file states without a name, as a `config.json` that the planner reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from phalanx.data.cached import cache_folder, cached_file, content_key
from phalanx.errors import JobError
from phalanx.planner.importers.entries import BAD_VALUE
from phalanx.planner.importers.foreign import ForeignPlan

_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


def config_file(foreign: ForeignPlan) -> Path:
    """The sizes as a configuration of a family with the same matrices, in the cache.

    Gated blocks are Llama's, experts Mixtral's, plain ones GPT-NeoX's: parameters, FLOPs and
    memory follow from sizes alone.

    Raises:
        JobError: `foreign/value` naming the sizes that the file does not state.
    """
    missing = [name for name in _NEEDED if name not in foreign.sizes]
    if missing:
        rule = f"states no model and not all sizes: missing are {', '.join(missing)}; name MODEL"
        raise JobError(BAD_VALUE, foreign.path or foreign.kind, None, rule)
    table = _config(dict(foreign.sizes))
    told = f"{table['num_hidden_layers']}x{table['hidden_size']}-{content_key(table)[:8]}"
    folder = cache_folder("foreign") / told

    def write(path: Path) -> None:
        path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")

    folder.mkdir(parents=True, exist_ok=True)
    return cached_file(folder / "config.json", write)


def _config(sizes: dict[str, Any]) -> dict[str, Any]:
    heads = sizes["num_attention_heads"]
    family = "llama" if sizes.get("hidden_act") == "silu" else "gpt_neox"
    if sizes.get("num_experts"):
        family = "mixtral"
        sizes["num_local_experts"] = sizes.pop("num_experts")
        sizes["intermediate_size"] = sizes.pop("moe_intermediate_size", sizes["intermediate_size"])
    rest = {
        "model_type": family,
        "num_key_value_heads": heads,
        "head_dim": sizes["hidden_size"] // heads,
        "max_position_embeddings": 1 << 20,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "torch_dtype": "bfloat16",
    }
    return rest | sizes
