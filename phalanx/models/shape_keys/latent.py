"""DeepSeek's latent attention with a mixture of experts, and what came from it."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.cost.model_shape import AttentionShape, FeedForwardShape, LayerShape, ModelShape
from phalanx.models.shape_keys.dense import SIZES
from phalanx.models.shape_keys.mixtures import shared_width
from phalanx.models.shape_keys.reader import ShapeKeys

_RANKS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_EXPERTS = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")


def _attention(keys: ShapeKeys) -> AttentionShape:
    heads, rope = keys.size("num_attention_heads"), keys.size("qk_rope_head_dim")
    has_index = keys.table.get("index_n_heads") is not None
    return AttentionShape(
        kind="latent",
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=keys.size("qk_nope_head_dim") + rope,
        value_dim=keys.size("v_head_dim"),
        query_rank=keys.size("q_lora_rank", 0, low=0),
        kv_rank=keys.size("kv_lora_rank"),
        rope_dim=rope,
        index_heads=keys.size("index_n_heads") if has_index else 0,
        index_dim=keys.size("index_head_dim") if has_index else 0,
        chosen_tokens=keys.size("index_topk") if has_index else 0,
    )


def _sparse(keys: ShapeKeys) -> FeedForwardShape:
    width = keys.size("moe_intermediate_size")
    return FeedForwardShape(
        num_experts=keys.size("n_routed_experts"),
        num_active=keys.size("num_experts_per_tok"),
        expert_width=width,
        shared_width=shared_width(keys, "#n_shared_experts", width),
    )


def _deepseek(keys: ShapeKeys) -> ModelShape:
    keys.require(*SIZES, "intermediate_size", *_RANKS, *_EXPERTS)
    attention, sparse = _attention(keys), _sparse(keys)
    kind, count = keys.table["model_type"], keys.size("num_hidden_layers")
    first = keys.size("first_k_dense_replace", 1 if kind == "glm4_moe_lite" else 0, low=0)
    # norms of both latents, and of the index's keys with a bias
    small = attention.query_rank + attention.kv_rank + 2 * attention.index_dim
    corrects = 0 if kind == "deepseek_v2" else sparse.num_experts
    dense = LayerShape(
        count=min(first, count),
        attention=attention,
        feed_forward=FeedForwardShape(width=keys.size("intermediate_size")),
        other_params=small,
    )
    others = LayerShape(
        count=count - dense.count,
        attention=attention,
        feed_forward=sparse,
        other_params=small + corrects,
    )
    return keys.model([layer for layer in (dense, others) if layer.count])


def _deepseek_v4(keys: ShapeKeys) -> ModelShape:
    """DeepSeek V4: one vector of C channels as key and value, kept for groups of tokens.

    Layers keep an entry per 4 tokens and choose among them by an index, or one per 128 and see all,
    both beside a window. The work is counted as that of the window and the chosen entries; the
    mixing of hyper-connections counts as parameters only.
    """
    keys.require(*SIZES, "head_dim", "q_lora_rank", "o_groups", "o_lora_rank", *_EXPERTS)
    count = keys.size("num_hidden_layers")
    kinds = keys.names("layer_types", count) or [
        _CHOOSING if at > 2 and at % 2 else "heavily_compressed_attention" for at in range(count)
    ]
    hidden, streams = keys.size("hidden_size"), keys.size("hc_mult", 4)
    experts, heads = keys.size("n_routed_experts"), keys.size("num_attention_heads")
    mixed = (2 + streams) * streams
    of_all = 2 * (mixed * streams * hidden + mixed + 3) + heads
    layers = []
    for at, kind in enumerate(kinds):
        attention, small = _compressed(keys, kind == _CHOOSING)
        small += experts if at >= keys.size("num_hash_layers", 3, low=0) else 0
        layers.append(
            LayerShape(
                count=1,
                attention=attention,
                feed_forward=_sparse(keys),
                other_params=small + of_all,
            )
        )
    return keys.model(layers, other_params=streams * streams * hidden + streams + 1)


_CHOOSING = "compressed_sparse_attention"


def _compressed(keys: ShapeKeys, chooses: bool) -> tuple[AttentionShape, int]:
    """The attention of a layer of DeepSeek V4, and its parameters beside products: compressors of
    keys (and of the index's keys), norms."""
    hidden, dim, rank = (keys.size(key) for key in ("hidden_size", "head_dim", "q_lora_rank"))
    window, index_dim = keys.size("sliding_window", 128), keys.size("index_head_dim", 128)
    attention = AttentionShape(
        num_heads=keys.size("num_attention_heads"),
        num_kv_heads=1,
        head_dim=dim,
        key_is_value=True,
        query_rank=rank,
        output_groups=keys.size("o_groups"),
        output_rank=keys.size("o_lora_rank"),
        window=0 if chooses else window,
        index_heads=keys.size("index_n_heads", 64) if chooses else 0,
        index_dim=index_dim if chooses else 0,
        chosen_tokens=window + keys.size("index_topk", 512) if chooses else 0,
        compression=8 if chooses else 256,
    )
    small = rank + 2 * dim
    if not chooses:
        return attention, small + 2 * dim * hidden + 128 * dim
    small += 4 * dim * hidden + 4 * 2 * dim
    # an index makes keys of a token with two projections more than the one that is counted
    return attention, small + 3 * index_dim * hidden + 4 * 2 * index_dim + index_dim


_LIKE_V3 = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm_moe_dsa",
    "glm4_moe_lite",
)  # fmt: skip
LATENT: dict[str, Callable[[ShapeKeys], ModelShape]] = {
    **{kind: _deepseek for kind in _LIKE_V3},
    "deepseek_v4": _deepseek_v4,
}
