"""Reading and writing a Hugging Face `config.json`, strictly. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from phalanx.errors import JobError, nearest_names
from phalanx.models.architecture import (
    DTYPE_BYTES,
    AttentionKind,
    DecoderConfig,
    layer_pattern,
    small_config,
)

__all__ = [
    "DTYPE_BYTES",
    "AttentionKind",
    "DecoderConfig",
    "parse_config",
    "read_config",
    "small_config",
    "to_huggingface",
]

_ARCHITECTURES = {"gemma3_text": "Gemma3ForCausalLM"}
_KIND_NAMES = {"sliding_attention": "sliding", "full_attention": "full"}

# Keys that every transformers config may carry and that change no number of the forward pass.
_WITHOUT_EFFECT = frozenset(
    """_name_or_path transformers_version torch_dtype dtype use_cache cache_implementation
    architectures model_type initializer_range return_dict output_attentions output_hidden_states
    chunk_size_feed_forward is_encoder_decoder is_decoder add_cross_attention
    cross_attention_hidden_size tie_encoder_decoder id2label label2id
    problem_type task_specific_params tokenizer_class prefix
    sep_token_id decoder_start_token_id finetuning_task torchscript pruned_heads
    _attn_implementation_autoset unsloth_fixed""".split()
)


def read_config(folder: str | Path) -> DecoderConfig:
    """The config of a model folder.

    Raises:
        JobError: `job/not-found` without a readable config.json; otherwise as `parse_config`.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        near = sorted(str(found.parent) for found in Path(folder).glob("*/config.json"))[:3]
        rule = "is no model folder: it has no config.json"
        raise JobError("job/not-found", "model folder", folder, rule, legal=near)
    try:
        table = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise JobError("job/syntax", str(path), None, f"is not valid JSON: {error}") from error
    return parse_config(table, str(path))


def parse_config(table: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """A DecoderConfig from the keys of a Hugging Face config; one it cannot honour is an error.

    Raises:
        JobError: `model/unknown` for another family, an unknown key or an option that the decoder
            does not compute; `job/missing` for an absent size.
    """
    family = table.get("model_type")
    if family not in _ARCHITECTURES:
        rule = f"model family {family!r} is not supported"
        raise JobError(
            "model/unknown", f"{where}: model_type", family, rule, legal=sorted(_ARCHITECTURES)
        )
    return _Gemma3Keys(table, where).config()


def to_huggingface(config: DecoderConfig) -> dict[str, Any]:
    """The `config.json` that transformers reads for this model."""
    sizes = {"gemma3_text": _gemma3_to_json}[config.family](config)
    eos = list(config.eos_tokens)
    return sizes | {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": config.family,
        "dtype": config.dtype,
        "bos_token_id": config.bos_token,
        "eos_token_id": eos if len(eos) > 1 else next(iter(eos), None),
        "pad_token_id": config.pad_token,
    }


class _Gemma3Keys:
    """Reader of `gemma3_text`, in the older (rope_theta) and newer (rope_parameters) form."""

    _SIZES = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads head_dim"
    ).split()
    _OPTIONS = (
        "rms_norm_eps max_position_embeddings query_pre_attn_scalar sliding_window layer_types "
        "sliding_window_pattern _sliding_window_pattern final_logit_softcapping rope_theta "
        "rope_local_base_freq rope_scaling rope_parameters bos_token_id eos_token_id pad_token_id"
    ).split()
    _FIXED: ClassVar = {  # the one value that the decoder computes; other values are refused
        "hidden_activation": ("gelu_pytorch_tanh", None),
        "attention_bias": (False, None),
        "attention_dropout": (0.0, None),
        "attn_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
        "tie_word_embeddings": (True,),
    }

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self.table, self.where = table, where
        known = {*self._SIZES, *self._OPTIONS, *self._FIXED}
        for key, value in table.items():
            if key in self._FIXED and value not in self._FIXED[key]:
                self._refuse(
                    key,
                    value,
                    "is an option that this decoder does not compute",
                    self._FIXED[key][:1],
                )
            elif key not in known and key not in _WITHOUT_EFFECT:
                rule = "is a key that the decoder does not know, so it cannot honour it"
                self._refuse(key, value, rule, nearest_names(key, known))
        for key in self._SIZES:
            if not isinstance(table.get(key), int):
                raise JobError(
                    "job/missing", f"{where}: {key}", table.get(key), "must be a whole number"
                )

    def _refuse(self, key: str, value: object, rule: str, legal: Any) -> None:
        raise JobError("model/unknown", f"{self.where}: {key}", value, rule, legal=legal)

    def config(self) -> DecoderConfig:
        get = self.table.get
        scalar = get("query_pre_attn_scalar", 256)
        if scalar <= 0:
            self._refuse("query_pre_attn_scalar", scalar, "must be positive", [get("head_dim")])
        eos = get("eos_token_id", 1)
        return DecoderConfig(
            family="gemma3_text",
            vocab_size=self.table["vocab_size"],
            hidden_size=self.table["hidden_size"],
            intermediate_size=self.table["intermediate_size"],
            layer_kinds=self._layer_kinds(),
            kinds=(self._kind("sliding"), self._kind("full")),
            query_scale=float(scalar) ** -0.5,
            norm_eps=get("rms_norm_eps", 1e-6),
            logit_soft_cap=get("final_logit_softcapping"),
            max_positions=get("max_position_embeddings", 131_072),
            init_std=get("initializer_range", 0.02),
            dtype=get("dtype") or get("torch_dtype") or "float32",
            bos_token=get("bos_token_id", 2),
            eos_tokens=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            pad_token=get("pad_token_id", 0),
        )

    def _layer_kinds(self) -> tuple[str, ...]:
        num_layers, named = self.table["num_hidden_layers"], self.table.get("layer_types")
        if named is None:
            every = self.table.get("sliding_window_pattern") or self.table.get(
                "_sliding_window_pattern", 6
            )
            return layer_pattern(num_layers, every)
        for name in named:
            if name not in _KIND_NAMES:
                self._refuse("layer_types", name, "is no layer kind of this family", _KIND_NAMES)
        if len(named) != num_layers:
            self._refuse("layer_types", len(named), "must name each layer once", [num_layers])
        return tuple(_KIND_NAMES[name] for name in named)

    def _kind(self, name: str) -> AttentionKind:
        theta, factor = self._rope(name)
        return AttentionKind(
            name=name,
            window=self.table.get("sliding_window", 4096) if name == "sliding" else None,
            num_heads=self.table["num_attention_heads"],
            num_kv_heads=self.table["num_key_value_heads"],
            head_dim=self.table["head_dim"],
            rope_theta=theta,
            rope_factor=factor,
        )

    def _rope(self, name: str) -> tuple[float, float]:
        """(theta, factor) of a layer kind; scaling touches full layers only in the older form."""
        newer = (self.table.get("rope_parameters") or {}).get(f"{name}_attention")
        older = self.table.get("rope_scaling") if name == "full" else None
        rope = newer or older or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "linear"):
            self._refuse(
                "rope_type",
                kind,
                "is a position scaling that is not computed here",
                ["default", "linear"],
            )
        key, default = (
            ("rope_theta", 1_000_000.0) if name == "full" else ("rope_local_base_freq", 10_000.0)
        )
        theta = rope.get("rope_theta", self.table.get(key, default))
        return float(theta), float(rope.get("factor", 1.0)) if kind == "linear" else 1.0


def _gemma3_to_json(config: DecoderConfig) -> dict[str, Any]:
    kind = config.kind("full")
    rope = {
        f"{each.name}_attention": (
            {"rope_type": "default", "rope_theta": each.rope_theta}
            if each.rope_factor == 1.0
            else {"rope_type": "linear", "rope_theta": each.rope_theta, "factor": each.rope_factor}
        )
        for each in config.kinds
    }
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": kind.num_heads,
        "num_key_value_heads": kind.num_kv_heads,
        "head_dim": kind.head_dim,
        "layer_types": [f"{name}_attention" for name in config.layer_kinds],
        "sliding_window": config.kind("sliding").window,
        "rope_parameters": rope,
        "query_pre_attn_scalar": round(config.query_scale**-2),
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "final_logit_softcapping": config.logit_soft_cap,
        "initializer_range": config.init_std,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    }
