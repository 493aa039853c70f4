"""Reading and writing a Hugging Face `config.json`, strictly. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from phalanx.errors import JobError, nearest_names, shown
from phalanx.models.architecture import (
    DTYPE_BYTES,
    AttentionKind,
    DecoderConfig,
    layer_pattern,
    small_config,
)
from phalanx.strict import read_value

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

_TABLE = dict[str, Any] | None
_MOST = 2**31 - 1  # no dimension of a tensor is longer
_MOST_LAYERS = 100_000

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
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        rule = "is no model folder: it has no config.json that can be read"
        near = _folders_in(Path(folder))
        raise JobError("job/not-found", "model folder", folder, rule, legal=near) from error
    try:
        table = json.loads(content.decode())
    except RecursionError:
        raise JobError("job/syntax", str(path), None, "is nested too deeply") from None
    except ValueError as error:
        raise JobError("job/syntax", str(path), None, f"is not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise JobError("job/syntax", str(path), shown(table), "must be a JSON object")
    return parse_config(table, str(path))


def _folders_in(folder: Path) -> list[str]:
    """Model folders right below a folder, if that is one."""
    try:
        return sorted(str(found.parent) for found in folder.glob("*/config.json"))[:3]
    except (OSError, ValueError):
        return []


def parse_config(table: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """A DecoderConfig from the keys of a Hugging Face config; one it cannot honour is an error.

    Raises:
        JobError: `model/unknown` for another family, an unknown key or an option that the decoder
            does not compute; `job/missing` for an absent size; `job/bad-value` for a value of
            another type or out of range.
    """
    family = table.get("model_type")
    if not isinstance(family, str) or family not in _ARCHITECTURES:
        name, legal = shown(family), sorted(_ARCHITECTURES)
        rule = f"model family {name} is not supported"
        raise JobError("model/unknown", f"{where}: model_type", name, rule, legal=legal)
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
                rule = "is an option that this decoder does not compute"
                self._refuse(key, value, rule, self._FIXED[key][:1])
            elif key not in known and key not in _WITHOUT_EFFECT:
                rule = "is a key that the decoder does not know, so it cannot honour it"
                self._refuse(key, value, rule, nearest_names(key, known))
        for key in self._SIZES:
            if table.get(key) is None:
                raise JobError("job/missing", f"{where}: {key}", None, "must be a whole number")

    def _refuse(self, key: str, value: object, rule: str, legal: Any) -> None:
        raise JobError("model/unknown", f"{self.where}: {key}", shown(value), rule, legal=legal)

    def _read(self, key: str, kind: Any, default: Any = None) -> Any:
        """The value of a key, of this kind."""
        return read_value(self.table.get(key, default), kind, f"{self.where}: {key}")

    def _size(self, key: str, default: int | None = None, most: int = _MOST) -> int:
        value = self._read(key, int, default)
        if not 1 <= value <= most:
            rule, near = f"must lie in 1..{most}", [1 if value < 1 else most]
            raise JobError("job/bad-value", f"{self.where}: {key}", value, rule, legal=near)
        return value

    def _positive(self, key: str, value: Any) -> float:
        number = read_value(value, float, f"{self.where}: {key}")
        if number <= 0:
            raise JobError("job/bad-value", f"{self.where}: {key}", number, "must be > 0")
        return number

    def config(self) -> DecoderConfig:
        get = self.table.get
        scalar = self._read("query_pre_attn_scalar", float, 256)
        if scalar <= 0:
            self._refuse("query_pre_attn_scalar", scalar, "must be positive", [get("head_dim")])
        cap = get("final_logit_softcapping")
        eos = self._read("eos_token_id", int | list[int] | None, 1)
        layer_kinds = self._layer_kinds()
        return DecoderConfig(
            family="gemma3_text",
            vocab_size=self._size("vocab_size"),
            hidden_size=self._size("hidden_size"),
            intermediate_size=self._size("intermediate_size"),
            layer_kinds=layer_kinds,
            kinds=(self._kind("sliding", "sliding" in layer_kinds), self._kind("full", False)),
            query_scale=scalar**-0.5,
            norm_eps=self._positive("rms_norm_eps", get("rms_norm_eps", 1e-6)),
            logit_soft_cap=None if cap is None else self._positive("final_logit_softcapping", cap),
            max_positions=self._size("max_position_embeddings", 131_072),
            init_std=self._positive("initializer_range", get("initializer_range", 0.02)),
            dtype=self._dtype(),
            bos_token=self._read("bos_token_id", int | None, 2),
            eos_tokens=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            pad_token=self._read("pad_token_id", int | None, 0),
        )

    def _dtype(self) -> str:
        named = (self._read(key, str | None) for key in ("dtype", "torch_dtype"))
        return next(filter(None, named), "float32")

    def _layer_kinds(self) -> tuple[str, ...]:
        num_layers = self._size("num_hidden_layers", most=_MOST_LAYERS)
        named = self._read("layer_types", list[str] | None)
        if named is None:
            older = self.table.get("sliding_window_pattern") is not None
            key = "sliding_window_pattern" if older else "_sliding_window_pattern"
            return layer_pattern(num_layers, self._size(key, 6))
        for name in named:
            if name not in _KIND_NAMES:
                self._refuse("layer_types", name, "is no layer kind of this family", _KIND_NAMES)
        if len(named) != num_layers:
            self._refuse("layer_types", len(named), "must name each layer once", [num_layers])
        return tuple(_KIND_NAMES[name] for name in named)

    def _kind(self, name: str, needs_window: bool) -> AttentionKind:
        theta, factor = self._rope(name)
        is_given = self.table.get("sliding_window", 4096) is not None
        has_window = name == "sliding" and (is_given or needs_window)
        return AttentionKind(
            name=name,
            window=self._size("sliding_window", 4096) if has_window else None,
            num_heads=self._size("num_attention_heads"),
            num_kv_heads=self._size("num_key_value_heads"),
            head_dim=self._size("head_dim"),
            rope_theta=theta,
            rope_factor=factor,
        )

    def _rope(self, name: str) -> tuple[float, float]:
        """(theta, factor) of a layer kind; scaling touches full layers only in the older form."""
        of_kinds = self._read("rope_parameters", _TABLE) or {}
        layers = f"{name}_attention"
        newer = read_value(of_kinds.get(layers), _TABLE, f"{self.where}: rope_parameters.{layers}")
        older = self._read("rope_scaling", _TABLE) if name == "full" else None
        rope = newer or older or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "linear"):
            rule = "is a position scaling that is not computed here"
            self._refuse("rope_type", kind, rule, ["default", "linear"])
        key, default = (
            ("rope_theta", 1_000_000.0) if name == "full" else ("rope_local_base_freq", 10_000.0)
        )
        theta = self._positive(key, rope.get("rope_theta", self.table.get(key, default)))
        factor = self._positive("rope factor", rope.get("factor", 1.0))
        return theta, factor if kind == "linear" else 1.0


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
