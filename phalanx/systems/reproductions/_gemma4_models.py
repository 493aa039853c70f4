"""The five Gemma 4 text models by their sizes, as arXiv 2605.25645 and Hugging Face give them."""

from __future__ import annotations

from typing import Any

from phalanx.models.config import DecoderConfig, parse_config
from phalanx.models.named import named_model
from phalanx.models.spec import LoraSpec, layer_tensors, lora_tensors

LORA = LoraSpec(rank=64, alpha=64)
_COMMON: dict[str, Any] = {
    "model_type": "gemma4_text",
    "dtype": "bfloat16",
    "vocab_size": 262_144,
    "num_attention_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}
_TABLES: dict[str, dict[str, Any]] = {
    "26B-A4B": {
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
    "E4B": {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 42,
        "num_key_value_heads": 2,
        "sliding_window": 512,
        "num_kv_shared_layers": 18,
        "hidden_size_per_layer_input": 256,
    },
    "E2B": {
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "sliding_window": 512,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 256,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    },
}
SIZES = ("31B", "12B", *_TABLES)


def config_of(size: str) -> DecoderConfig:
    """The text model of that size."""
    if size in _TABLES:
        return parse_config(_COMMON | _TABLES[size], f"Gemma 4 {size}")
    return named_model(f"gemma-4-{size.lower()}").config


def layer_params(config: DecoderConfig) -> int:
    """Parameters of all layers: without the embedding, which a prompt does not multiply with."""
    layers = range(config.num_layers)
    return sum(spec.num_elements for at in layers for spec in layer_tensors(config, at))


def adapter_params(config: DecoderConfig) -> tuple[int, int, int]:
    """Trained parameters in three forms of one recipe.

    Returns:
        One adapter per matrix; keys and values sharing their A (a fused projection); the same
        without an adapter of the keys in full layers, whose fused projection has another name than
        the recipe's pattern matches.
    """
    adapters = lora_tensors(config, LORA)
    each = sum(spec.num_elements for spec in adapters.values())
    shared = sum(s.num_elements for n, s in adapters.items() if n.endswith("v_proj.lora_A.weight"))
    unmatched = sum(
        spec.num_elements
        for name, spec in adapters.items()
        if ".k_proj." in name and config.layer_kinds[int(name.split(".")[2])] == "full"
    )
    return each, each - shared, each - shared - unmatched
