"""Families like Llama: grouped queries, one feed-forward, norms without biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from phalanx.cost.model_shape import AttentionShape, FeedForwardShape, LayerShape, ModelShape
from phalanx.models.shape_keys.reader import ShapeKeys

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


class Form(NamedTuple):
    """Where a family differs from Llama.

    Attributes:
        is_gated: three matrices in the feed-forward, not two.
        qkv_bias: queries, keys and values have biases whatever the config says.
        attention_bias: what an absent attention_bias means.
        head_norms: queries and keys are normalised per head, with C weights each.
        wide_norms: they are normalised over all heads.
        norms: vectors of D weights in a layer.
        final_bias: the last norm has a bias (and `norms` counts biases).
        tied: what an absent tie_word_embeddings means.
    """

    is_gated: bool = True
    qkv_bias: bool = False
    attention_bias: bool = False
    head_norms: bool = False
    wide_norms: bool = False
    norms: int = 2
    final_bias: bool = False
    tied: bool = False


_FORMS = {
    "llama": Form(),
    "mistral": Form(),
    "ministral3": Form(),
    "granite": Form(),
    "seed_oss": Form(qkv_bias=True),
    "smollm3": Form(tied=True),
    "phi3": Form(),
    "qwen2": Form(qkv_bias=True),
    "qwen3": Form(head_norms=True),
    "gemma": Form(tied=True),
    "gemma2": Form(norms=4, tied=True),
    "olmo2": Form(wide_norms=True),
    "cohere": Form(norms=1, tied=True),
    "glm4": Form(norms=4),
    "exaone4": Form(head_norms=True),
    "nemotron": Form(is_gated=False, norms=4, final_bias=True),
    "starcoder2": Form(is_gated=False, norms=4, final_bias=True, tied=True),
}


def attention_of(keys: ShapeKeys, window: int = 0) -> AttentionShape:
    """Grouped-query attention by the usual keys."""
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    return AttentionShape(
        num_heads=heads,
        num_kv_heads=keys.size("num_key_value_heads", heads),
        head_dim=keys.head_dim(hidden, heads),
        window=window,
    )


def small_params(keys: ShapeKeys, each: AttentionShape, form: Form, width: int = 0) -> int:
    """Biases and norms of heads in one layer with this attention."""
    hidden, queries = keys.size("hidden_size"), each.num_heads * each.head_dim
    cached = 2 * each.num_kv_heads * each.head_dim
    biases = keys.flag("attention_bias", form.attention_bias) or keys.flag("use_bias")
    found = queries + cached if form.qkv_bias or biases else 0
    found += hidden if biases and not form.qkv_bias else 0
    if keys.flag("mlp_bias") or keys.flag("use_bias"):
        found += (2 if form.is_gated else 1) * width + hidden
    found += 2 * each.head_dim if form.head_norms else 0
    return found + (queries + cached // 2 if form.wide_norms else 0)


def windows(keys: ShapeKeys) -> list[int]:
    """The window of each layer by layer_types, sliding_window and, of Gemma 2, its pattern."""
    count = keys.size("num_hidden_layers")
    if keys.table.get("sliding_window") is None or not keys.flag("use_sliding_window", True):
        return [0] * count
    window = keys.size("sliding_window")
    if kinds := keys.names("layer_types", count):
        return [window if kind == "sliding_attention" else 0 for kind in kinds]
    if keys.table["model_type"] in ("gemma2", "gpt_oss"):
        return [0 if at % 2 else window for at in range(count)]
    return [window] * count


def _dense(keys: ShapeKeys, form: Form) -> ModelShape:
    keys.require(*SIZES, "intermediate_size")
    width = keys.size("intermediate_size")
    layers = []
    for window in windows(keys):
        attention = attention_of(keys, window)
        layers.append(
            LayerShape(
                count=1,
                attention=attention,
                feed_forward=FeedForwardShape(width=width, is_gated=form.is_gated),
                norms=form.norms,
                other_params=small_params(keys, attention, form, width),
            )
        )
    other = keys.size("hidden_size") if form.final_bias else 0
    return keys.model(layers, tied=form.tied, other_params=other)


def _reader(form: Form) -> Callable[[ShapeKeys], ModelShape]:
    return lambda keys: _dense(keys, form)


DENSE = {kind: _reader(form) for kind, form in _FORMS.items()}
