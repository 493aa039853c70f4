"""How llama.cpp writes each family: tensor names, what it changes in them, metadata keys. No torch.

A form translates between a `config.json` table and GGUF metadata, in both directions. Facts: the
GGUF specification (ggml repository, docs/gguf.md) and llama.cpp's conversion/{base,llama,qwen,
gemma}.py (the version that llama-cpp-python 0.3.36 carries).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import pi
from typing import Any

from phalanx.errors import JobError
from phalanx.models.config import to_huggingface
from phalanx.models.spec import DecoderConfig

Table = dict[str, Any]
ROPE_FACTORS = "rope_freqs.weight"  # llama 3's scaling of each frequency, as a tensor

_GLOBAL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_MATRICES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

# key after the architecture's name -> key of config.json, for what all families share
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
}
_EPS, _BASE = "attention.layer_norm_rms_epsilon", "rope.freq_base"
_LOCAL_BASE, _WINDOW, _CAP = (
    "rope.freq_base_swa",
    "attention.sliding_window",
    "final_logit_softcapping",
)
_SCALING, _FACTOR = "rope.scaling.type", "rope.scaling.factor"
_ROTATED = "rope.dimension_count"


@dataclass(frozen=True)
class GgufForm:
    """A family in llama.cpp.

    Attributes:
        architecture: its name there; also the prefix of its keys.
        model_type: its name in `config.json`.
        modules: module of a layer -> name below `blk.N`.
        norm_offset: what is added to norm weights.
        interleaves: rows of the query and key matrices are reordered within a head, so that the
            channels of a rotated pair are neighbours.
        keys: metadata keys that are read, without the architecture; others are refused.
        read: metadata (without prefix) -> keys of `config.json` beside the sizes.
        write: `config.json` -> metadata beside the sizes.
    """

    architecture: str
    model_type: str
    modules: Mapping[str, str]
    norm_offset: float
    interleaves: bool
    keys: frozenset[str]
    read: Callable[[Mapping[str, Any]], Table]
    write: Callable[[Table], Table]

    def stored_name(self, canonical: str) -> str:
        """The name that llama.cpp gives a canonical tensor."""
        module = canonical.removesuffix(".weight")
        if module in _GLOBAL:
            return f"{_GLOBAL[module]}.weight"
        _, _, layer, inner = module.split(".", 3)
        return f"blk.{layer}.{self.modules[inner]}.weight"

    def config_table(self, found: Mapping[str, Any], where: str) -> Table:
        """`config.json` from metadata, without what only tokens and tensors tell.

        Raises:
            JobError: `model/unknown` for a key or value that the decoder would not honour,
                `job/missing` for an absent size.
        """
        for key in found:
            if key not in self.keys:
                rule = "is a key that this reader cannot honour"
                raise JobError("model/unknown", where, f"{self.architecture}.{key}", rule)
        table: Table = {"model_type": self.model_type}
        for key, name in _SIZES.items():
            if key in found:
                table[name] = found[key]
            elif key != "attention.value_length" and name != "head_dim":
                raise JobError("job/missing", f"{where}: {self.architecture}.{key}", None, "absent")
        if "head_dim" not in table and _ROTATED in found:
            table["head_dim"] = found[_ROTATED]
        if found.get("attention.value_length", table.get("head_dim")) != table.get("head_dim"):
            rule = "differs from attention.key_length"
            value = found["attention.value_length"]
            raise JobError("model/unknown", f"{where}: attention.value_length", value, rule)
        table["rms_norm_eps"] = _decimal(found.get(_EPS, 1e-6))
        return table | self.read(found)

    def metadata(self, config: DecoderConfig) -> Table:
        """Metadata of a model, without the architecture's prefix; floats are float32 keys."""
        table = to_huggingface(config)
        found = {key: table[name] for key, name in _SIZES.items()}
        return found | {_EPS: float(table["rms_norm_eps"])} | self.write(table)


def _decimal(value: float) -> float:
    """float32 in the file, a decimal in configs: 9.99999997e-07 is 1e-06."""
    return float(f"{value:.6g}")


def _rope(table: Table, kind: str = "full_attention") -> Table:
    rope = table["rope_parameters"]
    return rope.get(kind, rope)


def _require(is_so: bool, where: str, value: object, rule: str) -> None:
    if not is_so:
        raise JobError("model/unknown", where, value, f"llama.cpp cannot be told: {rule}")


def _read_plain(found: Mapping[str, Any]) -> Table:
    return {"rope_theta": float(found.get(_BASE, 10_000.0))}


def _write_plain(table: Table) -> Table:
    rope = _rope(table)
    kind = rope.get("rope_type", "default")
    _require(kind in ("default", "llama3"), "rope_type", kind, "only the scaling of Llama 3")
    window = table.get("sliding_window")
    _require(window is None, "sliding_window", window, "this family has none there")
    return {_BASE: float(rope["rope_theta"])}


def _write_llama(table: Table) -> Table:
    sizes = {"vocab_size": table["vocab_size"], _ROTATED: table["head_dim"]}
    return _write_plain(table) | sizes


def _read_gemma3(found: Mapping[str, Any]) -> Table:
    """The query scale is not in the file: llama.cpp knows the one model (27B) that differs."""
    layers, width, heads = (
        found[key] for key in ("block_count", "embedding_length", "attention.head_count")
    )
    scalar = width // heads if layers == _LAYERS_27B else found["attention.key_length"]
    rope = {"rope_theta": float(found.get(_BASE, 1e6)), "rope_type": "default"}
    if found.get(_SCALING, "none") == "linear":
        rope |= {"rope_type": "linear", "factor": float(found[_FACTOR])}
    elif _SCALING in found or _FACTOR in found:
        rule = "is a position scaling that this family does not have"
        value = found.get(_SCALING)
        raise JobError("model/unknown", f"{_SCALING}, {_FACTOR}", value, rule, legal=["linear"])
    local = {"rope_theta": float(found.get(_LOCAL_BASE, 1e4)), "rope_type": "default"}
    table: Table = {
        "query_pre_attn_scalar": scalar,
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
        "sliding_window": found.get(_WINDOW),
        "sliding_window_pattern": _PATTERN,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    if _CAP in found:
        table["final_logit_softcapping"] = float(found[_CAP])
    return table


_LAYERS_27B, _PATTERN = 62, 6  # facts that llama.cpp holds in its code, not in the file


def _write_gemma3(table: Table) -> Table:
    full, local = _rope(table), _rope(table, "sliding_attention")
    kinds = table["layer_types"]
    wanted = ["sliding_attention" if (at + 1) % _PATTERN else "full_attention"
              for at in range(len(kinds))]  # fmt: skip
    _require(kinds == wanted, "layer_types", kinds, "every sixth layer is full, the others slide")
    heads, width = table["num_attention_heads"], table["hidden_size"]
    scalar = width // heads if len(kinds) == _LAYERS_27B else table["head_dim"]
    value = table["query_pre_attn_scalar"]
    _require(value == scalar, "query_pre_attn_scalar", value, f"it assumes {scalar}")
    found: Table = {
        _BASE: float(full["rope_theta"]),
        _LOCAL_BASE: float(local["rope_theta"]),
        _WINDOW: table["sliding_window"],
    }
    if full.get("rope_type") == "linear":
        found |= {_SCALING: "linear", _FACTOR: float(full["factor"])}
    if table.get("final_logit_softcapping"):
        found[_CAP] = float(table["final_logit_softcapping"])
    return found


_SHARED_KEYS = frozenset({*_SIZES, _EPS, _BASE})
_PRE_NORMS = {"post_attention_layernorm": "ffn_norm"}
FORMS: dict[str, GgufForm] = {
    form.architecture: form
    for form in (
        GgufForm(
            architecture="llama",
            model_type="llama",
            modules=_MATRICES | _PRE_NORMS,
            norm_offset=0.0,
            interleaves=True,
            keys=_SHARED_KEYS | {"vocab_size", _ROTATED},
            read=_read_plain,
            write=_write_llama,
        ),
        GgufForm(
            architecture="qwen3",
            model_type="qwen3",
            modules=_MATRICES | _PRE_NORMS | _HEAD_NORMS,
            norm_offset=0.0,
            interleaves=False,
            keys=_SHARED_KEYS,
            read=_read_plain,
            write=_write_plain,
        ),
        GgufForm(
            architecture="gemma3",
            model_type="gemma3_text",
            modules=_MATRICES | _HEAD_NORMS | _SANDWICH,
            norm_offset=1.0,  # stored as 1 + w
            interleaves=False,
            keys=_SHARED_KEYS | {_LOCAL_BASE, _WINDOW, _CAP, _SCALING, _FACTOR},
            read=_read_gemma3,
            write=_write_gemma3,
        ),
    )
}


def form_of(config: DecoderConfig) -> GgufForm:
    """The form of a model's family.

    Raises:
        JobError: `model/unknown` for a family without one.
    """
    for form in FORMS.values():
        if form.model_type == config.family:
            return form
    legal = [form.model_type for form in FORMS.values()]
    rule = "is a family whose GGUF form is not known here"
    raise JobError("model/unknown", "model family", config.family, rule, legal=legal)


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> list[float]:
    """What each frequency is divided by under Llama 3.1's scaling, as llama.cpp stores it.

    Args:
        rope: `rope_parameters` with rope_theta, factor, low_freq_factor, high_freq_factor and
            original_max_position_embeddings.

    Source: Llama 3.1's reference code (apply_scaling); conversion/llama.py.
    """
    factor, positions = rope["factor"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for at in range(0, head_dim, 2):
        wave = 2 * pi * rope["rope_theta"] ** (at / head_dim)
        if wave < positions / high:
            factors.append(1.0)
        elif wave > positions / low:
            factors.append(factor)
        else:
            smooth = (positions / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def llama3_rope(factors: list[float], theta: float, where: str) -> Table:
    """The scaling that gave these factors: Llama 3's bands, with the factor found in them.

    Raises:
        JobError: `model/unknown` for factors of another scaling.
    """
    for positions in (8192, 4096, 2048, 1024, 512, 256, 128, 64):
        rope: Table = {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": max(factors),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": positions,
        }
        expected = llama3_factors(rope, 2 * len(factors))
        if all(abs(a - b) <= 1e-4 * b for a, b in zip(factors, expected)):
            return rope
    rule = "are frequency factors of a scaling that is not Llama 3's"
    raise JobError("model/unknown", f"{where}: {ROPE_FACTORS}", factors[:4], rule)
