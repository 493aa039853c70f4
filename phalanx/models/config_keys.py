"""Strict reading of a Hugging Face config's keys: what families share. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from phalanx.errors import JobError, nearest_names, shown
from phalanx.models.architecture import AttentionKind, FrequencyBands
from phalanx.strict import read_value

KIND_NAMES = {"sliding_attention": "sliding", "full_attention": "full"}
GATED_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}

TABLE = dict[str, Any] | None
_MOST = 2**31 - 1  # no dimension of a tensor is longer
_MOST_LAYERS = 100_000

# Keys that every transformers config may carry and that change no number of the forward pass.
WITHOUT_EFFECT = frozenset(
    """_name_or_path transformers_version torch_dtype dtype use_cache cache_implementation
    architectures model_type initializer_range return_dict output_attentions output_hidden_states
    chunk_size_feed_forward is_encoder_decoder is_decoder add_cross_attention
    cross_attention_hidden_size tie_encoder_decoder id2label label2id
    problem_type task_specific_params tokenizer_class prefix
    sep_token_id decoder_start_token_id finetuning_task torchscript pruned_heads
    _attn_implementation_autoset unsloth_fixed""".split()
)
_COMMON = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim rms_norm_eps max_position_embeddings bos_token_id eos_token_id "
    "pad_token_id"
).split()
# Rotation variants and the keys of each beside rope_type and rope_theta.
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    ),
    "proportional": ("factor", "partial_rotary_factor"),
}  # fmt: skip


class ConfigKeys:
    """A config whose every key is known.

    Args:
        table: the config.
        where: its name in errors.
        required: sizes that must be given.
        optional: other keys that the family reads, beside those that all families read.
        fixed: key -> the values that the decoder computes; others are refused.

    Raises:
        JobError: `model/unknown` for a key or value that cannot be honoured, `job/missing` for an
            absent size.
    """

    def __init__(
        self,
        table: Mapping[str, Any],
        where: str,
        *,
        required: Sequence[str],
        optional: Sequence[str] = (),
        fixed: Mapping[str, tuple[Any, ...]],
    ) -> None:
        self.table, self.where = table, where
        known = {*_COMMON, *required, *optional, *fixed}
        for key, value in table.items():
            if key in fixed and value not in fixed[key]:
                rule = "is an option that this decoder does not compute"
                self.refuse(key, value, rule, fixed[key][:1])
            elif key not in known and key not in WITHOUT_EFFECT:
                rule = "is a key that the decoder does not know, so it cannot honour it"
                self.refuse(key, value, rule, nearest_names(key, known))
        for key in required:
            if table.get(key) is None:
                raise JobError("job/missing", f"{where}: {key}", None, "must be a whole number")

    def refuse(self, key: str, value: object, rule: str, legal: Iterable[Any]) -> None:
        """Raise `model/unknown`."""
        raise JobError("model/unknown", f"{self.where}: {key}", shown(value), rule, legal=legal)

    def read(self, key: str, kind: Any, default: Any = None) -> Any:
        """The value of a key, of this kind."""
        return read_value(self.table.get(key, default), kind, f"{self.where}: {key}")

    def size(self, key: str, default: int | None = None, *, low: int = 1, most: int = _MOST) -> int:
        """A whole number in low..most; null is the default where there is one."""
        given = self.table.get(key)
        value = default if given is None and default is not None else self.read(key, int)
        if not low <= value <= most:
            rule, near = f"must lie in {low}..{most}", [low if value < low else most]
            raise JobError("job/bad-value", f"{self.where}: {key}", value, rule, legal=near)
        return value

    def positive(self, key: str, value: Any) -> float:
        """`value` as a number > 0."""
        number = read_value(value, float, f"{self.where}: {key}")
        if number <= 0:
            raise JobError("job/bad-value", f"{self.where}: {key}", number, "must be > 0")
        return number

    def common(
        self, *, norm_eps: float = 1e-6, max_positions: int, bos: int | None, eos: int | None,
        pad: int | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Fields of DecoderConfig that every family reads alike; arguments are defaults."""
        get = self.table.get
        eos_tokens = self.read("eos_token_id", int | list[int] | None, eos)
        named = (self.read(key, str | None) for key in ("dtype", "torch_dtype"))
        return {
            "vocab_size": self.size("vocab_size"),
            "hidden_size": self.size("hidden_size"),
            "intermediate_size": self.size("intermediate_size"),
            "norm_eps": self.positive("rms_norm_eps", get("rms_norm_eps", norm_eps)),
            "max_positions": self.size("max_position_embeddings", max_positions),
            "init_std": self.positive("initializer_range", get("initializer_range", 0.02)),
            "dtype": next(filter(None, named), "float32"),
            "bos_token": self.read("bos_token_id", int | None, bos),
            "eos_tokens": _as_tuple(eos_tokens),
            "pad_token": self.read("pad_token_id", int | None, pad),
        }

    def num_layers(self) -> int:
        """Decoder layers."""
        return self.size("num_hidden_layers", most=_MOST_LAYERS)

    def soft_cap(self) -> float | None:
        """final_logit_softcapping."""
        cap = self.table.get("final_logit_softcapping")
        return None if cap is None else self.positive("final_logit_softcapping", cap)

    def layer_types(self) -> tuple[str, ...] | None:
        """The kinds that layer_types names; None without it."""
        num_layers, named = self.num_layers(), self.read("layer_types", list[str] | None)
        if named is None:
            return None
        for name in named:
            if name not in KIND_NAMES:
                self.refuse("layer_types", name, "is no layer kind of this family", KIND_NAMES)
        if len(named) != num_layers:
            self.refuse("layer_types", len(named), "must name each layer once", [num_layers])
        return tuple(KIND_NAMES[name] for name in named)

    def rope(
        self, rope: Mapping[str, Any], theta_key: str, theta: Any, variants: Sequence[str]
    ) -> dict[str, Any]:
        """The rotation fields of an AttentionKind.

        Args:
            rope: table with rope_type and its numbers; may be empty.
            theta_key, theta: where the base is named if not in the table, and what it is there.
            variants: rope types that the family uses.
        """
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in variants:
            self.refuse("rope_type", kind, "is a position scaling that is not computed here",
                        variants)  # fmt: skip
        known = {"rope_type", "type", "rope_theta", *_ROPE_KEYS[kind]}
        for key, value in rope.items():
            neutral = (key == "partial_rotary_factor" and value == 1.0) or (
                key == "factor" and value in (1.0, None)
            )
            if key not in known and not neutral:
                rule = f"means nothing to a rope of type {kind}"
                self.refuse(f"rope {key}", value, rule, nearest_names(key, known))
        fields: dict[str, Any] = {
            "rope_theta": self.positive(theta_key, rope.get("rope_theta", theta))
        }
        if "factor" in _ROPE_KEYS[kind]:
            fields["rope_factor"] = self.positive("rope factor", rope.get("factor", 1.0))
        if kind == "llama3":
            fields["rope_bands"] = self._bands(rope)
        if kind == "proportional":
            share = rope.get("partial_rotary_factor", 1.0)
            fields["rope_rotated_frac"] = self.positive("rope partial_rotary_factor", share)
        return fields

    def _bands(self, rope: Mapping[str, Any]) -> FrequencyBands:
        def number(key: str) -> float:
            return self.positive(f"rope {key}", rope.get(key))

        low, high = number("low_freq_factor"), number("high_freq_factor")
        if high <= low:
            where, rule = f"{self.where}: rope high_freq_factor", f"must be > {low:g}"
            raise JobError("job/bad-value", where, high, rule)
        where = f"{self.where}: rope original_max_position_embeddings"
        context = read_value(rope.get("original_max_position_embeddings"), int, where)
        if context < 1:
            raise JobError("job/bad-value", where, context, "must be >= 1", legal=[1])
        return FrequencyBands(low, high, context)


def _as_tuple(tokens: int | list[int] | None) -> tuple[int, ...]:
    if tokens is None:
        return ()
    return tuple(tokens) if isinstance(tokens, list) else (tokens,)


def rope_to_json(kind: AttentionKind) -> dict[str, Any]:
    """The rope table of a layer kind, as `ConfigKeys.rope` reads it."""
    table: dict[str, Any] = {"rope_type": "default", "rope_theta": kind.rope_theta}
    if kind.rope_bands is not None:
        low, high, positions = kind.rope_bands
        table |= {
            "rope_type": "llama3",
            "factor": kind.rope_factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": positions,
        }
    elif kind.rope_rotated_frac != 1.0:
        table |= {"rope_type": "proportional", "partial_rotary_factor": kind.rope_rotated_frac}
        table |= {} if kind.rope_factor == 1.0 else {"factor": kind.rope_factor}
    elif kind.rope_factor != 1.0:
        table |= {"rope_type": "linear", "factor": kind.rope_factor}
    return table


def older_rope_to_json(kind: AttentionKind) -> dict[str, Any]:
    """The same in the keys that transformers had before rope_parameters: a reader that knows only
    these would otherwise take its own defaults without a word."""
    table = rope_to_json(kind)
    theta = table.pop("rope_theta")
    return {"rope_theta": theta, "rope_scaling": table if len(table) > 1 else None}


def layer_types_to_json(layer_kinds: Sequence[str]) -> list[str]:
    """The value of layer_types."""
    return [f"{name}_attention" for name in layer_kinds]
