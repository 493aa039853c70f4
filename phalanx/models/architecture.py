"""What a decoder is: frozen records of its sizes and variants. No torch.

Attention facts (window, heads, head size, RoPE) live per layer kind, never globally: families such
as Gemma 4 give sliding and full layers different head sizes. A family (`models.families`) turns a
`config.json` into these records; nothing else knows its name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isqrt
from typing import NamedTuple

from phalanx.errors import JobError, nearest_names, nearest_numbers

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
ACTIVATIONS = ("gelu_tanh", "silu")


def _require_positive(where: str, value: int) -> None:
    if value < 1:
        raise JobError("job/bad-value", where, value, "must be >= 1", legal=[1])


class FrequencyBands(NamedTuple):
    """Llama 3.1's scaling: frequencies of long waves are divided, short ones kept, between them
    a blend (Hugging Face's "llama3").

    Attributes:
        low_factor, high_factor: waves longer than positions / low_factor are scaled, shorter than
            positions / high_factor are not.
        positions: the context before it was extended.
    """

    low_factor: float
    high_factor: float
    positions: int


@dataclass(frozen=True, kw_only=True)
class AttentionKind:
    """Attention of one layer kind.

    Args:
        name: "sliding" or "full".
        window: tokens that a query sees, itself included; None: all before it.
        num_heads, num_kv_heads, head_dim: query heads H, key and value heads K, channels C.
        rope_theta: base of the rotation frequencies.
        rope_factor: frequencies are divided by it: all of them, or as `rope_bands` says.
        rope_bands: which frequencies the factor touches; None: all (Hugging Face's "linear").
        rope_rotated_frac: share of the frequencies that rotate, the fastest first; the others are
            0 (Hugging Face's "proportional").
        key_is_value: there is no value projection; values are keys before their norm and rotation.
    """

    name: str
    window: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rope_factor: float = 1.0
    rope_bands: FrequencyBands | None = None
    rope_rotated_frac: float = 1.0
    key_is_value: bool = False

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


class PerLayerEmbedding(NamedTuple):
    """A second embedding that gives every layer `width` channels of its own (Gemma 4 E models)."""

    vocab_size: int
    width: int


class Experts(NamedTuple):
    """A mixture of experts beside the dense feed-forward (Gemma 4 26B-A4B)."""

    num_experts: int
    num_active: int
    width: int


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder: sizes, and the variants in which families differ.

    Args:
        family: Hugging Face's `model_type` of the text model; names the file that reads and writes
            its config.
        intermediate_size: feed-forward width F.
        ffn_widths: width of each layer where they differ; (): `intermediate_size` for all.
        layer_kinds: one name of `kinds` per layer.
        kinds: the attention of each layer kind.
        query_scale: factor on q k^T.
        activation: of the gated feed-forward, one of `ACTIVATIONS`.
        norm_offset: added to stored norm weights: 1 for weights around zero, 0 for plain ones.
        sandwich_norms: each block has a norm after it too.
        qk_norm: queries and keys are normalised per head before rotation.
        value_norm: values are normalised per head, without weights.
        scale_embedding: the embedding is multiplied by sqrt(hidden_size).
        tied_head: the head is the embedding; else `lm_head.weight`.
        kv_sources: the layer whose keys and values each layer uses; (): its own.
        layer_scalar: each layer's output is multiplied by a stored number that is not trained.
        per_layer_embedding, experts: None where the family has none.
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
    ffn_widths: tuple[int, ...] = ()
    activation: str = "gelu_tanh"
    norm_offset: float = 1.0
    sandwich_norms: bool = True
    qk_norm: bool = True
    value_norm: bool = False
    scale_embedding: bool = True
    tied_head: bool = True
    kv_sources: tuple[int, ...] = ()
    layer_scalar: bool = False
    per_layer_embedding: PerLayerEmbedding | None = None
    experts: Experts | None = None
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
        if self.activation not in ACTIVATIONS:
            legal = nearest_names(self.activation, ACTIVATIONS) or ACTIVATIONS
            where, rule = "model.activation", "is not computed"
            raise JobError("job/bad-value", where, self.activation, rule, legal=legal)

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

    def ffn_width(self, layer: int) -> int:
        """Feed-forward width of one layer."""
        return self.ffn_widths[layer] if self.ffn_widths else self.intermediate_size

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer uses, mostly itself."""
        return self.kv_sources[layer] if self.kv_sources else layer

    def kv_layers(self, kind: str | None = None) -> list[int]:
        """Layers (of a kind) that make keys and values of their own, which a cache holds."""
        return [
            at
            for at, name in enumerate(self.layer_kinds)
            if kind in (None, name) and self.kv_source(at) == at
        ]

    def require_computable(self) -> None:
        """Raise `model/unknown` for a mixture of experts, which is counted but not computed."""
        if self.experts is not None:
            rule, count = "mixtures of experts are counted, not computed", self.experts.num_experts
            raise JobError("model/unknown", "model.experts", count, rule, legal=[0])

    def with_dtype(self, dtype: str) -> DecoderConfig:
        """The same model with weights of another dtype."""
        return replace(self, dtype=dtype)


def layer_pattern(num_layers: int, full_every: int) -> tuple[str, ...]:
    """Every n-th layer full, the others sliding."""
    return tuple("sliding" if (at + 1) % full_every else "full" for at in range(num_layers))
