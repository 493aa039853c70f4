"""Qwen 3 dense: norms of queries and keys per head, plain norms before each block, SiLU, no biases.

Source: Qwen3 technical report, arXiv 2505.09388, section 2; Hugging Face's `qwen3` config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.models.architecture import AttentionKind, DecoderConfig
from phalanx.models.config_keys import (
    TABLE,
    ConfigKeys,
    layer_types_to_json,
    older_rope_to_json,
    rope_to_json,
)
from phalanx.models.families import Family

_SIZES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads".split()
_OPTIONS = (
    "rope_theta rope_scaling rope_parameters tie_word_embeddings use_sliding_window "
    "sliding_window max_window_layers layer_types"
).split()
_FIXED = {
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "attention_dropout": (0.0, None),
}


def _read(table: Mapping[str, Any], where: str) -> DecoderConfig:
    keys = ConfigKeys(table, where, required=_SIZES, optional=_OPTIONS, fixed=_FIXED)
    num_heads, head_dim = keys.size("num_attention_heads"), keys.size("head_dim", 128)
    rope = keys.read("rope_parameters", TABLE) or keys.read("rope_scaling", TABLE) or {}
    heads: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": keys.size("num_key_value_heads", num_heads),
        "head_dim": head_dim,
    } | keys.rope(
        rope, "rope_theta", table.get("rope_theta", 10_000.0), ("default", "linear", "llama3")
    )
    layer_kinds = _layer_kinds(keys)
    kinds = [AttentionKind(name="full", window=None, **heads)]
    if "sliding" in layer_kinds:
        kinds.insert(0, AttentionKind(name="sliding", window=keys.size("sliding_window"), **heads))
    return DecoderConfig(
        family=FAMILY.model_type,
        layer_kinds=layer_kinds,
        kinds=tuple(kinds),
        query_scale=head_dim**-0.5,
        activation="silu",
        norm_offset=0.0,
        sandwich_norms=False,
        scale_embedding=False,
        tied_head=keys.read("tie_word_embeddings", bool, False),
        **keys.common(max_positions=32_768, bos=None, eos=None),
    )


def _layer_kinds(keys: ConfigKeys) -> tuple[str, ...]:
    """Windows need use_sliding_window; then layers from max_window_layers on have one."""
    slides = keys.read("use_sliding_window", bool, False) and keys.table.get("sliding_window")
    named = keys.layer_types()
    if named is None:
        first = keys.size("max_window_layers", 28, low=0) if slides else keys.num_layers()
        return tuple("sliding" if at >= first else "full" for at in range(keys.num_layers()))
    if "sliding" in named and not slides:
        rule = "sliding layers need use_sliding_window and sliding_window"
        keys.refuse("layer_types", "sliding_attention", rule, ["full_attention"])
    return named


def _write(config: DecoderConfig) -> dict[str, Any]:
    kind = config.kind("full")
    windows = [each.window for each in config.kinds if each.window is not None]
    return {
        "num_attention_heads": kind.num_heads,
        "num_key_value_heads": kind.num_kv_heads,
        "head_dim": kind.head_dim,
        "rope_parameters": rope_to_json(kind),
        **older_rope_to_json(kind),
        "layer_types": layer_types_to_json(config.layer_kinds),
        "use_sliding_window": bool(windows),
        "sliding_window": windows[0] if windows else None,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied_head,
    }


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    read=_read,
    write=_write,
)
