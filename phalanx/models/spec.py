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
    "is_target",
    "kv_bytes",
    "kv_token_bytes",
    "layer_tensors",
    "lora_targets",
    "lora_tensors",
    "lora_warnings",
    "num_params",
    "parse_config",
    "read_config",
    "small_config",
    "to_huggingface",
    "unused_names",
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
        init_std: standard deviation of its fresh values; 0: all equal `init_mean`.
        init_mean: mean of its fresh values.
        is_trained: False for what Hugging Face keeps as a buffer: stored, never trained.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    init_std: float = 0.0
    init_mean: float = 0.0
    is_trained: bool = True

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.num_elements * DTYPE_BYTES[self.dtype]


_Shapes = dict[str, tuple[int, ...]]
_ONES = ("scale", "per_expert_scale", "layer_scalar")  # what starts at 1 beside plain norms


def layer_tensors(config: DecoderConfig, layer: int) -> list[TensorSpec]:
    """The tensors of one decoder layer, in the order in which they are used."""
    d = config.hidden_size
    shapes: _Shapes = {"input_layernorm.weight": (d,)}
    shapes |= {f"self_attn.{name}": s for name, s in _attention_shapes(config, layer).items()}
    shapes["post_attention_layernorm.weight"] = (d,)
    if config.sandwich_norms:
        shapes["pre_feedforward_layernorm.weight"] = (d,)
    f = config.ffn_width(layer)
    shapes |= {"mlp.gate_proj.weight": (f, d), "mlp.up_proj.weight": (f, d)}
    shapes["mlp.down_proj.weight"] = (d, f)
    if config.experts is not None:
        shapes |= _expert_shapes(config)
    if config.sandwich_norms:
        shapes["post_feedforward_layernorm.weight"] = (d,)
    if config.per_layer_embedding is not None:
        width = config.per_layer_embedding.width
        shapes["per_layer_input_gate.weight"] = (width, d)
        shapes["per_layer_projection.weight"] = (d, width)
        shapes["post_per_layer_input_norm.weight"] = (d,)
    if config.layer_scalar:
        shapes["layer_scalar"] = (1,)
    return [_tensor(config, f"model.layers.{layer}.{name}", s) for name, s in shapes.items()]


def _attention_shapes(config: DecoderConfig, layer: int) -> _Shapes:
    kind, d = config.attention(layer), config.hidden_size
    q, kv = kind.num_heads * kind.head_dim, kind.num_kv_heads * kind.head_dim
    makes_kv = config.kv_source(layer) == layer
    shapes: _Shapes = {"q_proj.weight": (q, d)}
    if makes_kv:
        shapes["k_proj.weight"] = (kv, d)
    if makes_kv and not kind.key_is_value:
        shapes["v_proj.weight"] = (kv, d)
    if config.qk_norm:
        shapes["q_norm.weight"] = (kind.head_dim,)
    if config.qk_norm and makes_kv:
        shapes["k_norm.weight"] = (kind.head_dim,)
    return shapes | {"o_proj.weight": (d, q)}


def _expert_shapes(config: DecoderConfig) -> _Shapes:
    """A router and experts beside the dense feed-forward, each path with norms of its own."""
    assert config.experts is not None
    (count, _, width), d = config.experts, config.hidden_size
    return {
        "post_feedforward_layernorm_1.weight": (d,),
        "router.scale": (d,),
        "router.proj.weight": (count, d),
        "router.per_expert_scale": (count,),
        "pre_feedforward_layernorm_2.weight": (d,),
        "experts.gate_up_proj": (count, 2 * width, d),
        "experts.down_proj": (count, d, width),
        "post_feedforward_layernorm_2.weight": (d,),
    }


def _tensor(config: DecoderConfig, name: str, shape: tuple[int, ...]) -> TensorSpec:
    leaf = name.rsplit(".", 1)[-1]
    if len(shape) > 1:
        return TensorSpec(name, shape, config.dtype, config.init_std)
    mean = 1.0 if leaf in _ONES else 1.0 - config.norm_offset
    return TensorSpec(name, shape, config.dtype, init_mean=mean, is_trained=leaf != "layer_scalar")


def canonical_tensors(config: DecoderConfig) -> dict[str, TensorSpec]:
    """Name -> spec of every stored tensor; a tied head is the embedding and not stored twice."""
    d = config.hidden_size
    shapes: _Shapes = {"model.embed_tokens.weight": (config.vocab_size, d)}
    if (ple := config.per_layer_embedding) is not None:
        channels = config.num_layers * ple.width
        shapes["model.embed_tokens_per_layer.weight"] = (ple.vocab_size, channels)
        shapes["model.per_layer_model_projection.weight"] = (channels, d)
        shapes["model.per_layer_projection_norm.weight"] = (ple.width,)
    specs = [_tensor(config, name, shape) for name, shape in shapes.items()]
    for layer in range(config.num_layers):
        specs += layer_tensors(config, layer)
    specs.append(_tensor(config, "model.norm.weight", (d,)))
    if not config.tied_head:
        specs.append(_tensor(config, "lm_head.weight", (config.vocab_size, d)))
    return {spec.name: spec for spec in specs}


def unused_names(config: DecoderConfig) -> frozenset[str]:
    """Tensors that checkpoints hold although no layer reads them: Gemma 4's E models store keys and
    values of layers that use another layer's. They are neither loaded nor changed."""
    parts = ("k_proj", "v_proj", "k_norm", "v_norm")
    sharing = (at for at in range(config.num_layers) if config.kv_source(at) != at)
    return frozenset(
        f"model.layers.{at}.self_attn.{part}.weight" for at in sharing for part in parts
    )


def num_params(config: DecoderConfig) -> int:
    """Parameters of the model, the tied head counted once."""
    return sum(spec.num_elements for spec in canonical_tensors(config).values())


def weight_bytes(config: DecoderConfig) -> int:
    """Bytes of all weights in the config's dtype."""
    return sum(spec.num_bytes for spec in canonical_tensors(config).values())


def kv_token_bytes(config: DecoderConfig, kind: str | None = None, dtype: str = "") -> int:
    """Bytes of keys and values per cached token, of layers of one kind or of all: 2 K C each.

    Args:
        dtype: of the cache; "": the config's.
    """
    itemsize = DTYPE_BYTES[dtype or config.dtype]
    kinds = map(config.attention, config.kv_layers(kind))
    return sum(2 * each.num_kv_heads * each.head_dim * itemsize for each in kinds)


def kv_bytes(config: DecoderConfig, num_tokens: int, dtype: str = "") -> int:
    """Bytes of the cache of one sequence when layers with a window keep that window only."""
    return sum(
        kv_token_bytes(config, kind.name, dtype) * min(num_tokens, kind.window or num_tokens)
        for kind in config.kinds
    )


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
                "job/bad-value", "train.lora_rank", self.rank, "must be >= 1", legal=[1, 8, 16]
            )
        if not 0.0 <= self.dropout < 1.0:
            rule = "must lie in 0 <= dropout < 1"
            raise JobError(
                "job/bad-value", "train.lora_dropout", self.dropout, rule, legal=[0.0, 0.05]
            )

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank


def is_target(module: str, pattern: str) -> bool:
    """Whether an adapter's target names a module: the end of its name, as PEFT has it, or a pattern
    of the whole."""
    return f".{module}".endswith(f".{pattern}") or fnmatchcase(module, pattern)


def lora_targets(config: DecoderConfig, lora: LoraSpec) -> list[TensorSpec]:
    """The matrices that get an adapter, in canonical order: those of layers, without routers.

    Raises:
        JobError: `job/bad-value` for a target that matches no matrix.
    """
    modules = {
        name: spec for at in range(config.num_layers) for name, spec in _matrices(config, at)
    }
    for pattern in lora.targets:
        if not any(is_target(module, pattern) for module in modules):
            legal = nearest_names(pattern, PROJECTIONS)
            rule = "matches no matrix of the model"
            raise JobError("job/bad-value", "train.lora_targets", repr(pattern), rule, legal=legal)
    return [
        spec for module, spec in modules.items() if any(is_target(module, p) for p in lora.targets)
    ]


def _matrices(config: DecoderConfig, layer: int) -> list[tuple[str, TensorSpec]]:
    """(module, spec) of the matrices of a layer that an adapter may extend."""
    return [
        (spec.name.removesuffix(".weight"), spec)
        for spec in layer_tensors(config, layer)
        if len(spec.shape) == 2 and ".router." not in spec.name
    ]


def lora_warnings(config: DecoderConfig, lora: LoraSpec) -> list[str]:
    """One line for each target that adapts nothing in a whole kind of layers.

    Layers are of one kind when they have the same attention and the same matrices: in Gemma 4,
    `v_proj` leaves out full layers (K = V), `k_proj` those that use another layer's keys. A target
    that names one module in full says what it means and is never warned of.
    """
    kinds: dict[tuple[str, bool], list[int]] = {}
    for at, name in enumerate(config.layer_kinds):
        kinds.setdefault((name, config.kv_source(at) != at), []).append(at)
    warnings = []
    for pattern in lora.targets:
        if "." in pattern and not set(pattern) & set("*?["):
            continue
        for (name, shares), layers in kinds.items():
            modules = [module for at in layers for module, _ in _matrices(config, at)]
            if not any(is_target(module, pattern) for module in modules):
                which = f"{len(layers)} {name} layers"
                which += " that use keys and values of other layers" if shares else ""
                near = f"they have {', '.join(sorted({m.rsplit('.', 1)[-1] for m in modules}))}"
                warnings.append(
                    f"train.lora_targets = {pattern!r}: adapts nothing in the {which}: {near}"
                )
    return warnings


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
