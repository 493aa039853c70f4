"""What a decoder is: a frozen record read strictly from a Hugging Face `config.json`. No torch.

Attention facts (window, heads, head size, RoPE) live per layer kind, never globally: families such
as Gemma 4 give sliding and full layers different head sizes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.errors import JobError, nearest_names

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, kw_only=True)
class AttentionKind:
    """Attention of one layer kind.

    Args:
        name: "sliding" or "full".
        window: tokens that a query sees, itself included; None: all before it.
        num_heads, num_kv_heads, head_dim: query heads H, key and value heads K, channels C.
        rope_theta: base of the rotation frequencies.
        rope_factor: every frequency is divided by it (Hugging Face's "linear" scaling).
    """

    name: str
    window: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rope_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder of the Gemma 3 text family.

    Args:
        layer_kinds: one name of `kinds` per layer.
        kinds: the attention of each layer kind.
        query_scale: factor on q k^T (query_pre_attn_scalar ** -0.5).
        logit_soft_cap: c of c * tanh(logits / c); None: logits as they are.
        init_std: standard deviation of freshly drawn matrices.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_kinds: tuple[str, ...]
    kinds: tuple[AttentionKind, ...]
    query_scale: float
    norm_eps: float = 1e-6
    logit_soft_cap: float | None = None
    max_positions: int = 32768
    init_std: float = 0.02
    dtype: str = "bfloat16"
    bos_token: int | None = 2
    eos_tokens: tuple[int, ...] = (1,)
    pad_token: int | None = 0

    @property
    def num_layers(self) -> int:
        """Decoder layers L."""
        return len(self.layer_kinds)

    def attention(self, layer: int) -> AttentionKind:
        """The attention of one layer."""
        return self.kind(self.layer_kinds[layer])

    def kind(self, name: str) -> AttentionKind:
        """The attention of a layer kind."""
        return next(kind for kind in self.kinds if kind.name == name)

    def with_dtype(self, dtype: str) -> DecoderConfig:
        """The same model with weights of another dtype."""
        return replace(self, dtype=dtype)


_FAMILIES = {"gemma3_text": "Gemma3ForCausalLM"}
