"""What a decoder is: frozen records of its sizes. No torch.

Attention facts (window, heads, head size, RoPE) live per layer kind, never globally: families such
as Gemma 4 give sliding and full layers different head sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

from phalanx.errors import JobError, nearest_numbers

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def _require_positive(where: str, value: int) -> None:
    if value < 1:
        raise JobError("job/bad-value", where, value, "must be >= 1", legal=[1])


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

    def __post_init__(self) -> None:
        for field in ("window", "num_heads", "num_kv_heads", "head_dim"):
            value = getattr(self, field)
            if not (value is None and field == "window"):
                _require_positive(f"{self.name} attention: {field}", value)
        if self.num_heads % self.num_kv_heads:
            low = [n for n in range(1, isqrt(self.num_heads) + 1) if self.num_heads % n == 0]
            divisors = {*low, *(self.num_heads // n for n in low)}
            where = f"{self.name} attention: num_kv_heads"
            rule = f"must divide the {self.num_heads} query heads"
            near = nearest_numbers(self.num_kv_heads, divisors)
            raise JobError("job/bad-value", where, self.num_kv_heads, rule, legal=near)
        if self.head_dim % 2:
            where, rule = (
                f"{self.name} attention: head_dim",
                "must be even: rotation pairs channels",
            )
            near = [self.head_dim - 1, self.head_dim + 1]
            raise JobError("job/bad-value", where, self.head_dim, rule, legal=near)


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

    def __post_init__(self) -> None:
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_layers"):
            _require_positive(f"model.{field}", getattr(self, field))
        if self.dtype not in DTYPE_BYTES:
            raise JobError(
                "job/bad-value", "model.dtype", self.dtype, "is not computed", legal=DTYPE_BYTES
            )

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
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
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


def layer_pattern(num_layers: int, full_every: int) -> tuple[str, ...]:
    """Every n-th layer full, the others sliding."""
    return tuple("sliding" if (at + 1) % full_every else "full" for at in range(num_layers))
