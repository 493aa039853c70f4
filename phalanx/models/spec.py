"""Shapes without tensors: canonical names, LoRA tensors, parameter and byte counts. No torch.

Canonical names and shapes are Hugging Face's, unfused; every other form of a model (fused, sharded,
packed, quantised) is derived from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from phalanx.errors import JobError, nearest_names
from phalanx.models.config import (
    DTYPE_BYTES,
    AttentionKind,
    DecoderConfig,
    parse_config,
    read_config,
    small_config,
    to_huggingface,
)

__all__ = [
    "DTYPE_BYTES",
    "AttentionKind",
    "DecoderConfig",
    "LoraSpec",
    "TensorSpec",
    "canonical_tensors",
    "layer_tensors",
    "lora_targets",
    "lora_tensors",
    "num_params",
    "parse_config",
    "read_config",
    "small_config",
    "to_huggingface",
    "weight_bytes",
]

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class TensorSpec:
    """One canonical tensor.

    Args:
        name: Hugging Face's name.
        shape: full, unsharded shape.
        dtype: name of the dtype it is stored in.
        init_std: standard deviation of its fresh values; 0: all zero.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    init_std: float = 0.0

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.num_elements * DTYPE_BYTES[self.dtype]


def layer_tensors(config: DecoderConfig, layer: int) -> list[TensorSpec]:
    """The tensors of one decoder layer, in the order in which they are used."""
    kind, d, f = config.attention(layer), config.hidden_size, config.intermediate_size
    q, kv = kind.num_heads * kind.head_dim, kind.num_kv_heads * kind.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (d,),
        "self_attn.q_proj": (q, d),
        "self_attn.k_proj": (kv, d),
        "self_attn.v_proj": (kv, d),
        "self_attn.q_norm": (kind.head_dim,),
        "self_attn.k_norm": (kind.head_dim,),
        "self_attn.o_proj": (d, q),
        "post_attention_layernorm": (d,),
        "pre_feedforward_layernorm": (d,),
        "mlp.gate_proj": (f, d),
        "mlp.up_proj": (f, d),
        "mlp.down_proj": (d, f),
        "post_feedforward_layernorm": (d,),
    }
    return [
        TensorSpec(
            f"model.layers.{layer}.{name}.weight",
            shape,
            config.dtype,
            config.init_std if len(shape) == 2 else 0.0,
        )
        for name, shape in shapes.items()
    ]


def canonical_tensors(config: DecoderConfig) -> dict[str, TensorSpec]:
    """Name -> spec of every stored tensor; the head is the embedding and not stored twice."""
    d = config.hidden_size
    embedding = TensorSpec(
        "model.embed_tokens.weight", (config.vocab_size, d), config.dtype, config.init_std
    )
    norm = TensorSpec("model.norm.weight", (d,), config.dtype)
    layers = [spec for at in range(config.num_layers) for spec in layer_tensors(config, at)]
    return {spec.name: spec for spec in (embedding, *layers, norm)}


def num_params(config: DecoderConfig) -> int:
    """Parameters of the model, the tied head counted once."""
    return sum(spec.num_elements for spec in canonical_tensors(config).values())


def weight_bytes(config: DecoderConfig) -> int:
    """Bytes of all weights in the config's dtype."""
    return sum(spec.num_bytes for spec in canonical_tensors(config).values())


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """Low-rank adapters: W + alpha / rank * B A, A [rank, in], B [out, rank].

    Args:
        rank: rank of the update.
        alpha: scale numerator.
        dropout: probability of zeroing an input of A while training.
        targets: last part of a module's name ("q_proj") or a pattern over its whole name
            ("model.layers.1?.mlp.*").

    Source: Hu et al., LoRA, arXiv 2106.09685, section 4.1. A is drawn as in PEFT, B starts at zero.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = PROJECTIONS

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise JobError(
                "job/bad-value", "lora.rank", self.rank, "must be >= 1", legal=[1, 8, 16]
            )
        if not 0.0 <= self.dropout < 1.0:
            rule = "must lie in 0 <= dropout < 1"
            raise JobError("job/bad-value", "lora.dropout", self.dropout, rule, legal=[0.0, 0.05])

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank


def _matches(module: str, pattern: str) -> bool:
    return module.rsplit(".", 1)[-1] == pattern or fnmatchcase(module, pattern)


def lora_targets(config: DecoderConfig, lora: LoraSpec) -> list[TensorSpec]:
    """The matrices that get an adapter, in canonical order.

    Raises:
        JobError: `job/bad-value` for a target that matches no matrix.
    """
    matrices = [
        spec
        for at in range(config.num_layers)
        for spec in layer_tensors(config, at)
        if len(spec.shape) == 2
    ]
    modules = {spec.name.removesuffix(".weight"): spec for spec in matrices}
    for pattern in lora.targets:
        if not any(_matches(module, pattern) for module in modules):
            legal = nearest_names(pattern, PROJECTIONS)
            rule = "matches no matrix of the model"
            raise JobError("job/bad-value", "lora.targets", repr(pattern), rule, legal=legal)
    return [
        spec for module, spec in modules.items() if any(_matches(module, p) for p in lora.targets)
    ]


def lora_tensors(
    config: DecoderConfig, lora: LoraSpec, dtype: str = "float32"
) -> dict[str, TensorSpec]:
    """Name -> spec of the adapters: `<module>.lora_A.weight` and `<module>.lora_B.weight`."""
    tensors: dict[str, TensorSpec] = {}
    for spec in lora_targets(config, lora):
        module, (num_out, num_in) = spec.name.removesuffix(".weight"), spec.shape
        # normal, with the variance of the uniform +-1/sqrt(in) that PEFT draws A from
        for part, shape, std in (
            ("lora_A", (lora.rank, num_in), (3.0 * num_in) ** -0.5),
            ("lora_B", (num_out, lora.rank), 0.0),
        ):
            name = f"{module}.{part}.weight"
            tensors[name] = TensorSpec(name, shape, dtype, std)
    return tensors
