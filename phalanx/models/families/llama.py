"""Llama 3.x (and earlier ones): full attention, plain norms before each block, SiLU.

Source: The Llama 3 Herd of Models, arXiv 2407.21783, section 3.2; Hugging Face's `llama` config,
with rope_scaling of Llama 3.1 and 3.2 ("llama3").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.models.architecture import AttentionKind, DecoderConfig
from phalanx.models.config_keys import TABLE, ConfigKeys, older_rope_to_json, rope_to_json
from phalanx.models.families import Family

_SIZES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads".split()
_OPTIONS = "rope_theta rope_scaling rope_parameters tie_word_embeddings".split()
_FIXED = {
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0.0, None),
    "pretraining_tp": (1, None),
}
_ROPES = ("default", "linear", "llama3")


def _read(table: Mapping[str, Any], where: str) -> DecoderConfig:
    keys = ConfigKeys(table, where, required=_SIZES, optional=_OPTIONS, fixed=_FIXED)
    num_heads = keys.size("num_attention_heads")
    head_dim = keys.size("head_dim", max(1, keys.size("hidden_size") // num_heads))
    rope = keys.read("rope_parameters", TABLE) or keys.read("rope_scaling", TABLE) or {}
    full = AttentionKind(
        name="full",
        window=None,
        num_heads=num_heads,
        num_kv_heads=keys.size("num_key_value_heads", num_heads),
        head_dim=head_dim,
        **keys.rope(rope, "rope_theta", table.get("rope_theta", 10_000.0), _ROPES),
    )
    return DecoderConfig(
        family=FAMILY.model_type,
        layer_kinds=("full",) * keys.num_layers(),
        kinds=(full,),
        query_scale=head_dim**-0.5,
        activation="silu",
        norm_offset=0.0,
        sandwich_norms=False,
        qk_norm=False,
        scale_embedding=False,
        tied_head=keys.read("tie_word_embeddings", bool, False),
        **keys.common(max_positions=2048, bos=1, eos=2),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    kind = config.kind("full")
    return {
        "num_attention_heads": kind.num_heads,
        "num_key_value_heads": kind.num_kv_heads,
        "head_dim": kind.head_dim,
        "rope_parameters": rope_to_json(kind),
        **older_rope_to_json(kind),
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied_head,
    }


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    read=_read,
    write=_write,
)
