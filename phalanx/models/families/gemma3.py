"""Gemma 3 text: windows and full attention in turn, norms around each block, tied head.

Source: Gemma 3 technical report, arXiv 2503.19786, section 2; Hugging Face's `gemma3_text` config
in its older (rope_theta, rope_local_base_freq) and newer (rope_parameters) form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.models.architecture import AttentionKind, DecoderConfig, layer_pattern
from phalanx.models.config_keys import (
    TABLE,
    ConfigKeys,
    layer_types_to_json,
    older_rope_to_json,
    rope_to_json,
)
from phalanx.models.families import Family
from phalanx.strict import read_value

_SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim"
).split()
_OPTIONS = (
    "query_pre_attn_scalar sliding_window layer_types sliding_window_pattern "
    "_sliding_window_pattern final_logit_softcapping rope_theta rope_local_base_freq rope_scaling "
    "rope_parameters"
).split()
_FIXED = {  # the one value that the decoder computes; other values are refused
    "hidden_activation": ("gelu_pytorch_tanh", None),
    "attention_bias": (False, None),
    "attention_dropout": (0.0, None),
    "attn_logit_softcapping": (None,),
    "use_bidirectional_attention": (False, None),
    "tie_word_embeddings": (True,),
}
_WRAPPER_KEYS = frozenset(
    """vision_config boi_token_index eoi_token_index image_token_index mm_tokens_per_image
    boi_token_id eoi_token_id image_token_id""".split()
)

# google/gemma-3-4b-it's text_config names five keys only
_WRAPPER_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}


def small_config(
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int = 512,
    full_every: int = 6,
    **other: Any,
) -> DecoderConfig:
    """A model of the Gemma 3 text family in any size, to train from scratch.

    Args:
        full_every: every n-th layer sees all earlier tokens, the others a window of `window`.
        other: further fields of DecoderConfig.
    """
    heads: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
    }
    return DecoderConfig(
        family="gemma3_text",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        layer_kinds=layer_pattern(num_layers, full_every),
        kinds=(
            AttentionKind(name="sliding", window=window, rope_theta=10_000.0, **heads),
            AttentionKind(name="full", window=None, rope_theta=1_000_000.0, **heads),
        ),
        query_scale=other.pop("query_scale", head_dim**-0.5),
        **other,
    )


def _read(table: Mapping[str, Any], where: str) -> DecoderConfig:
    keys = ConfigKeys(table, where, required=_SIZES, optional=_OPTIONS, fixed=_FIXED)
    scalar = keys.read("query_pre_attn_scalar", float, 256)
    if scalar <= 0:
        keys.refuse("query_pre_attn_scalar", scalar, "must be positive", [table.get("head_dim")])
    layer_kinds = _layer_kinds(keys)
    return DecoderConfig(
        family=FAMILY.model_type,
        layer_kinds=layer_kinds,
        kinds=(_kind(keys, "sliding", "sliding" in layer_kinds), _kind(keys, "full", False)),
        query_scale=scalar**-0.5,
        logit_soft_cap=keys.soft_cap(),
        **keys.common(max_positions=131_072, bos=2, eos=1, pad=0),
    )


def _layer_kinds(keys: ConfigKeys) -> tuple[str, ...]:
    if (named := keys.layer_types()) is not None:
        return named
    older = keys.table.get("sliding_window_pattern") is not None
    key = "sliding_window_pattern" if older else "_sliding_window_pattern"
    return layer_pattern(keys.num_layers(), keys.size(key, 6))


def _kind(keys: ConfigKeys, name: str, needs_window: bool) -> AttentionKind:
    is_given = keys.table.get("sliding_window", 4096) is not None
    has_window = name == "sliding" and (is_given or needs_window)
    return AttentionKind(
        name=name,
        window=_window(keys) if has_window else None,
        num_heads=keys.size("num_attention_heads"),
        num_kv_heads=keys.size("num_key_value_heads"),
        head_dim=keys.size("head_dim"),
        **_rope(keys, name),
    )


def _window(keys: ConfigKeys) -> int:
    return keys.size("sliding_window") if "sliding_window" in keys.table else 4096


def _rope(keys: ConfigKeys, name: str) -> dict[str, Any]:
    """Rotation of a layer kind; scaling touches full layers only in the older form."""
    of_kinds = keys.read("rope_parameters", TABLE) or {}
    layers = f"{name}_attention"
    newer = read_value(of_kinds.get(layers), TABLE, f"{keys.where}: rope_parameters.{layers}")
    older = keys.read("rope_scaling", TABLE) if name == "full" else None
    key, default = (
        ("rope_theta", 1_000_000.0) if name == "full" else ("rope_local_base_freq", 10_000.0)
    )
    theta = keys.table.get(key, default)
    return keys.rope(newer or older or {}, key, theta, ("default", "linear"))


def _write(config: DecoderConfig) -> dict[str, Any]:
    kind = config.kind("full")
    return {
        "num_attention_heads": kind.num_heads,
        "num_key_value_heads": kind.num_kv_heads,
        "head_dim": kind.head_dim,
        "layer_types": layer_types_to_json(config.layer_kinds),
        "sliding_window": config.kind("sliding").window,
        "rope_parameters": {f"{each.name}_attention": rope_to_json(each) for each in config.kinds},
        "rope_local_base_freq": config.kind("sliding").rope_theta,
        **older_rope_to_json(kind),
        "query_pre_attn_scalar": round(config.query_scale**-2),
        "final_logit_softcapping": config.logit_soft_cap,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    }


FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    read=_read,
    write=_write,
    wrapper_types=("gemma3",),
    wrapper_keys=_WRAPPER_KEYS,
    wrapper_defaults=_WRAPPER_DEFAULTS,
)
