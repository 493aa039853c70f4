"""Tiny configs of every family, of awkward sizes: what the equality tests of all engines share.

Each is given as the `config.json` that Hugging Face would have. `gemma4` is 31B's shape (two head
sizes, K = V in full layers), `gemma4_ple` that of the E models (per-layer embeddings, shared keys
and values, double-wide sharing layers).
"""

from __future__ import annotations

from typing import Any

from phalanx.models.config import parse_config
from phalanx.models.spec import DecoderConfig

_TOKENS = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "dtype": "float32"}
_GEMMA4 = {
    "model_type": "gemma4_text",
    "hidden_size": 64,
    "num_attention_heads": 8,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 8,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 512,
    **_TOKENS,
}

TABLES: dict[str, dict[str, Any]] = {
    "llama3": {
        "model_type": "llama",
        "vocab_size": 98,
        "hidden_size": 64,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
        **_TOKENS,
    },
    "llama3_tied": {
        "model_type": "llama",
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
        **_TOKENS,
    },
    "qwen3": {
        "model_type": "qwen3",
        "vocab_size": 102,
        "hidden_size": 60,
        "intermediate_size": 76,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,  # not hidden_size / num_attention_heads
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
        **_TOKENS,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "vocab_size": 94,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 5,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 17,
        "rope_theta": 1_000_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "max_position_embeddings": 512,
        **_TOKENS,
    },
    "gemma4": _GEMMA4
    | {
        "vocab_size": 106,
        "intermediate_size": 88,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    },
    "gemma4_ple": _GEMMA4
    | {
        "vocab_size": 86,
        "intermediate_size": 56,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_key_value_heads": 2,
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 86,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
    },
}
FAMILIES = tuple(TABLES)


def tiny_config(family: str, dtype: str = "float32") -> DecoderConfig:
    """The tiny model of one of `FAMILIES`."""
    return parse_config(TABLES[family]).with_dtype(dtype)
