"""Families before Llama: two matrices in the feed-forward, biases, learned positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from phalanx.cost.model_shape import AttentionShape, FeedForwardShape, LayerShape, ModelShape
from phalanx.models.shape_keys.reader import ShapeKeys

_HIDDEN = "n_embd|d_model|hidden_size"
_LAYERS = "n_layer|n_layers|num_layers|num_hidden_layers"
_HEADS = "n_head|n_heads|num_heads|num_attention_heads"
_WIDTH = "n_inner|ffn_dim|ffn_hidden_size|intermediate_size"


class _Form(NamedTuple):
    """What a family has beside its matrices.

    Attributes:
        attention_bias, value_bias: of q, k, v and the output; of the output alone.
        mlp_bias: of both matrices.
        norm_vectors: of D weights in a layer: 2 a norm with a bias.
        final_bias: the last norm has a bias.
        positions: rows that are learned beyond the context; None: none are learned.
        tied: what an absent tie_word_embeddings means.
        relative: each layer projects a table of distances to keys.
    """

    attention_bias: bool = True
    output_bias: bool = True
    mlp_bias: bool = True
    norm_vectors: int = 4
    final_bias: bool = True
    positions: int | None = None
    tied: bool = True
    relative: bool = False


_FORMS = {
    "gpt2": _Form(positions=0),
    "gpt_neo": _Form(attention_bias=False, positions=0),
    "gpt_neox": _Form(tied=False),
    "gptj": _Form(attention_bias=False, output_bias=False, norm_vectors=2, tied=False),
    "opt": _Form(positions=2),
    "bloom": _Form(),
    "gopher": _Form(attention_bias=False, output_bias=False, mlp_bias=False, norm_vectors=2,
                    final_bias=False, relative=True),
    "mpt": _Form(attention_bias=False, output_bias=False, mlp_bias=False, norm_vectors=2,
                 final_bias=False),
}  # fmt: skip


def _plain(keys: ShapeKeys, form: _Form) -> ModelShape:
    keys.require(_HIDDEN, _LAYERS, _HEADS, "vocab_size")
    hidden, heads = keys.size(_HIDDEN), keys.size(_HEADS)
    ratio = keys.size("expansion_ratio", 4)
    width = keys.size(_WIDTH, ratio * hidden)
    biases = 3 * hidden * form.attention_bias + hidden * form.output_bias
    biases += (width + hidden) * form.mlp_bias
    biases += hidden**2 if form.relative else 0
    head_dim = keys.divides("number of heads", hidden, heads)
    layer = LayerShape(
        count=keys.size(_LAYERS),
        attention=AttentionShape(num_heads=heads, num_kv_heads=heads, head_dim=head_dim),
        feed_forward=FeedForwardShape(width=width, is_gated=False),
        norms=form.norm_vectors,
        other_params=biases,
    )
    other = hidden if form.final_bias else 0
    kind = keys.table["model_type"]
    if kind == "bloom":
        other += 2 * hidden  # a norm after the embedding
    if kind == "gptj":
        other += keys.size("vocab_size")  # a bias of the head
    rows = 0
    if form.positions is not None:
        rows = keys.size("n_positions|max_position_embeddings|max_seq_len") + form.positions
    return keys.model(
        [layer], hidden=hidden, tied=form.tied, learned_positions=rows, other_params=other
    )


def _falcon(keys: ShapeKeys) -> ModelShape:
    keys.require("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    is_new = keys.flag("new_decoder_architecture")
    one = 1 if keys.flag("multi_query", True) else heads
    layer = LayerShape(
        count=keys.size("num_hidden_layers"),
        attention=AttentionShape(
            num_heads=heads,
            num_kv_heads=keys.size("num_kv_heads", heads) if is_new else one,
            head_dim=keys.divides("num_attention_heads", hidden, heads),
        ),
        feed_forward=FeedForwardShape(
            width=keys.size("ffn_hidden_size", 4 * hidden), is_gated=False
        ),
        norms=4 if is_new or not keys.flag("parallel_attn", True) else 2,
    )
    return keys.model([layer], tied=True, other_params=hidden)


def _t5(keys: ShapeKeys) -> ModelShape:
    """Encoder and decoder in one row of layers, attention to the encoder as layers of its own.

    T5 learns a bias of 32 buckets of distance per head, in the first layer of each stack.
    """
    keys.require("d_model", "d_kv", "d_ff", "num_layers", "num_heads", "vocab_size")
    heads, head_dim = keys.size("num_heads"), keys.size("d_kv")
    attention = AttentionShape(num_heads=heads, num_kv_heads=heads, head_dim=head_dim)
    is_gated = "gated" in str(keys.table.get("feed_forward_proj", "relu"))
    block = FeedForwardShape(width=keys.size("d_ff"), is_gated=is_gated)
    encoder = keys.size("num_layers")
    decoder = keys.size("num_decoder_layers", encoder)
    hidden = keys.size("d_model")
    layers = [
        LayerShape(count=encoder + decoder, attention=attention, feed_forward=block),
        LayerShape(count=decoder, attention=attention, feed_forward=FeedForwardShape(), norms=1),
    ]
    buckets = 2 * keys.size("relative_attention_num_buckets", 32) * heads
    return keys.model(layers, hidden=hidden, tied=True, other_params=hidden + buckets)


def _reader(form: _Form) -> Callable[[ShapeKeys], ModelShape]:
    return lambda keys: _plain(keys, form)


PLAIN: dict[str, Callable[[ShapeKeys], ModelShape]] = {
    **{kind: _reader(form) for kind, form in _FORMS.items()},
    "falcon": _falcon,
    "t5": _t5,
}
