"""Gemma 4 text: sliding and full layers with head sizes of their own, and the E models' extras.

Full layers may have no value projection (K = V) and rotate only the fastest quarter of their
frequencies. E models add per-layer embeddings and let their last layers use the keys and values of
the last layer of the same kind that makes its own. The mixture of experts of 26B-A4B is counted but
not computed.

Source: Hugging Face's `gemma4_text` config in both forms: global_head_dim and
num_global_key_value_heads, or per_layer_config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.models.architecture import (
    AttentionKind,
    DecoderConfig,
    Experts,
    PerLayerEmbedding,
    layer_pattern,
)
from phalanx.models.config_keys import TABLE, ConfigKeys, layer_types_to_json, rope_to_json
from phalanx.models.families import Family
from phalanx.strict import read_value

_SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim"
).split()
_OPTIONS = (
    "global_head_dim num_global_key_value_heads per_layer_config attention_k_eq_v sliding_window "
    "layer_types rope_parameters final_logit_softcapping vocab_size_per_layer_input "
    "hidden_size_per_layer_input num_kv_shared_layers use_double_wide_mlp enable_moe_block "
    "num_experts top_k_experts moe_intermediate_size"
).split()
_FIXED = {
    "hidden_activation": ("gelu_pytorch_tanh", None),
    "attention_bias": (False, None),
    "attention_dropout": (0.0, None),
    # "vision": tokens of images see each other; text, which is all there is here, is causal
    "use_bidirectional_attention": (None, "vision"),
    "tie_word_embeddings": (True, None),
}
_WRAPPER_KEYS = frozenset(
    """vision_config audio_config boi_token_id eoi_token_id image_token_id video_token_id
    boa_token_id eoa_token_id eoa_token_index audio_token_id
    vision_soft_tokens_per_image""".split()
)
_ROPES = {
    "sliding": {"rope_type": "default", "rope_theta": 10_000.0},
    "full": {
        "rope_type": "proportional",
        "rope_theta": 1_000_000.0,
        "partial_rotary_factor": 0.25,
    },
}


def _read(table: Mapping[str, Any], where: str) -> DecoderConfig:
    keys = ConfigKeys(table, where, required=_SIZES, optional=_OPTIONS, fixed=_FIXED)
    layer_kinds = keys.layer_types() or layer_pattern(keys.num_layers(), 6)
    if layer_kinds[-1] != "full":
        keys.refuse("layer_types", "sliding_attention", "the last layer must be full",
                    ["full_attention"])  # fmt: skip
    fields = keys.common(max_positions=131_072, bos=2, eos=1, pad=0)
    num_shared = keys.size("num_kv_shared_layers", 0, low=0)
    width = fields["intermediate_size"]
    num_own = len(layer_kinds) - num_shared
    doubles = keys.read("use_double_wide_mlp", bool, False) and num_shared > 0
    return DecoderConfig(
        family=FAMILY.model_type,
        layer_kinds=layer_kinds,
        kinds=_kinds(keys, layer_kinds),
        query_scale=1.0,
        ffn_widths=(width,) * num_own + (2 * width,) * num_shared if doubles else (),
        norm_offset=0.0,
        value_norm=True,
        kv_sources=_kv_sources(keys, layer_kinds, num_own) if num_shared else (),
        layer_scalar=True,
        per_layer_embedding=_per_layer_embedding(keys),
        experts=_experts(keys),
        logit_soft_cap=keys.soft_cap(),
        **fields,
    )


def _kinds(keys: ConfigKeys, layer_kinds: Sequence[str]) -> tuple[AttentionKind, ...]:
    num_kv_heads, head_dim = keys.size("num_key_value_heads"), keys.size("head_dim")
    key_is_value = keys.read("attention_k_eq_v", bool, False)
    given = keys.table.get("num_global_key_value_heads")
    full = {
        "head_dim": keys.size("global_head_dim", 512),
        "num_key_value_heads": keys.size("num_global_key_value_heads")
        if given is not None and key_is_value
        else num_kv_heads,
    } | _full_layer_sizes(keys, layer_kinds)
    sizes = {
        "sliding": (num_kv_heads, head_dim, keys.size("sliding_window", 512), False),
        "full": (full["num_key_value_heads"], full["head_dim"], None, key_is_value),
    }
    return tuple(
        AttentionKind(
            name=name,
            window=window,
            num_heads=keys.size("num_attention_heads"),
            num_kv_heads=kv_heads,
            head_dim=channels,
            key_is_value=without_values,
            **_rope(keys, name),
        )
        for name, (kv_heads, channels, window, without_values) in sizes.items()
    )


def _full_layer_sizes(keys: ConfigKeys, layer_kinds: Sequence[str]) -> dict[str, int]:
    """What per_layer_config says of full layers, which must all be alike."""
    table = keys.read("per_layer_config", TABLE)
    if table is None:
        return {}
    full = [str(at) for at, name in enumerate(layer_kinds) if name == "full"]
    rule = "must give every full layer, and no other, the same head_dim and num_key_value_heads"
    if set(table) != set(full):
        keys.refuse("per_layer_config", table, rule, full[:3])
    where = f"{keys.where}: per_layer_config"
    entries = [read_value(table[name], dict[str, int], where) for name in full]
    sizes: dict[str, int] = entries[0]
    is_known = set(sizes) <= {"head_dim", "num_key_value_heads"} and all(
        size >= 1 for size in sizes.values()
    )
    if not is_known or any(entry != sizes for entry in entries):
        keys.refuse("per_layer_config", table, rule, full[:3])
    return sizes


def _rope(keys: ConfigKeys, name: str) -> dict[str, Any]:
    of_kinds = keys.read("rope_parameters", TABLE) or {}
    layers = f"{name}_attention"
    for key in of_kinds:
        if key not in ("sliding_attention", "full_attention"):
            rule = "is no layer kind of this family"
            keys.refuse("rope_parameters", key, rule, ["sliding_attention", "full_attention"])
    where = f"{keys.where}: rope_parameters.{layers}"
    rope = read_value(of_kinds.get(layers), TABLE, where) or _ROPES[name]
    return keys.rope(
        rope, "rope_theta", _ROPES[name]["rope_theta"], ("default", "linear", "proportional")
    )


def _kv_sources(keys: ConfigKeys, layer_kinds: Sequence[str], num_own: int) -> tuple[int, ...]:
    """Own keys and values first; then those of the last such layer of the same kind."""
    last = {name: at for at, name in enumerate(layer_kinds[: max(0, num_own)])}
    if missing := set(layer_kinds) - set(last):
        num_shared = len(layer_kinds) - num_own
        rule = f"leaves no {min(missing)} layer that makes keys and values of its own"
        keys.refuse("num_kv_shared_layers", num_shared, rule, [0])
    return (*range(num_own), *(last[name] for name in layer_kinds[num_own:]))


def _per_layer_embedding(keys: ConfigKeys) -> PerLayerEmbedding | None:
    given = keys.table.get("hidden_size_per_layer_input", 256)
    width = 0 if given is None else keys.size("hidden_size_per_layer_input", 256, low=0)
    if width == 0:
        return None
    return PerLayerEmbedding(keys.size("vocab_size_per_layer_input", 262_144), width)


def _experts(keys: ConfigKeys) -> Experts | None:
    if not keys.read("enable_moe_block", bool, False):
        return None
    return Experts(
        keys.size("num_experts"), keys.size("top_k_experts"), keys.size("moe_intermediate_size")
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    sliding, full = config.kind("sliding"), config.kind("full")
    ple, experts = config.per_layer_embedding, config.experts
    num_shared = config.num_layers - len(config.kv_layers())
    table: dict[str, Any] = {
        "num_attention_heads": sliding.num_heads,
        "num_key_value_heads": sliding.num_kv_heads,
        "head_dim": sliding.head_dim,
        "num_global_key_value_heads": full.num_kv_heads if full.key_is_value else None,
        "global_head_dim": full.head_dim,
        "attention_k_eq_v": full.key_is_value,
        "sliding_window": sliding.window,
        "layer_types": layer_types_to_json(config.layer_kinds),
        "rope_parameters": {f"{kind.name}_attention": rope_to_json(kind) for kind in config.kinds},
        "final_logit_softcapping": config.logit_soft_cap,
        "hidden_size_per_layer_input": ple.width if ple else 0,
        "vocab_size_per_layer_input": ple.vocab_size if ple else config.vocab_size,
        "num_kv_shared_layers": num_shared,
        "use_double_wide_mlp": bool(config.ffn_widths),
        "enable_moe_block": experts is not None,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    }
    if experts is not None:
        names = ("num_experts", "top_k_experts", "moe_intermediate_size")
        table |= dict(zip(names, experts, strict=True))
    return table


FAMILY = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    read=_read,
    write=_write,
    wrapper_types=("gemma4",),
    wrapper_keys=_WRAPPER_KEYS,
)
