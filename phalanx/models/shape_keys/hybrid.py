"""Families that mix layers: linear attention beside softmax, or blocks of one kind each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phalanx.cost.model_shape import AttentionShape, FeedForwardShape, LayerShape, ModelShape
from phalanx.errors import JobError, shown
from phalanx.models.shape_keys.dense import SIZES, attention_of
from phalanx.models.shape_keys.mixtures import EXPERTS, shared_width
from phalanx.models.shape_keys.reader import ShapeKeys

_LINEAR = (
    "linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim",
    "linear_value_head_dim",
)  # fmt: skip
_MAMBA = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups")
_KINDS = {
    "M": "M", "mamba": "M", "linear_attention": "M", "*": "*", "attention": "*",
    "full_attention": "*", "-": "-", "mlp": "-", "E": "E", "moe": "E",
}  # fmt: skip


def _gated_delta(keys: ShapeKeys) -> AttentionShape:
    return AttentionShape(
        kind="linear",
        num_heads=keys.size("linear_num_value_heads"),
        num_kv_heads=keys.size("linear_num_key_heads"),
        head_dim=keys.size("linear_key_head_dim"),
        value_dim=keys.size("linear_value_head_dim"),
        is_gated=True,
        head_scalars=2,
    )


def _convolved(each: AttentionShape) -> int:
    """Channels that a linear attention convolves: queries, keys and values."""
    values = each.num_heads * (each.value_dim or each.head_dim)
    return 2 * each.num_kv_heads * each.head_dim + values


def _qwen_hybrid(keys: ShapeKeys) -> ModelShape:
    """Qwen3-Next and Qwen3.5: three gated delta rules to one gated attention."""
    is_sparse = keys.table["model_type"] in ("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")
    wanted = (EXPERTS, "num_experts_per_tok", "moe_intermediate_size")
    keys.require(*SIZES, *_LINEAR, *(wanted if is_sparse else ("intermediate_size",)))
    count, hidden = keys.size("num_hidden_layers"), keys.size("hidden_size")
    linear, softmax = _gated_delta(keys), attention_of(keys)
    softmax = AttentionShape(
        num_heads=softmax.num_heads,
        num_kv_heads=softmax.num_kv_heads,
        head_dim=softmax.head_dim,
        is_gated=True,
    )
    block = FeedForwardShape(
        width=0 if is_sparse else keys.size("intermediate_size"),
        num_experts=keys.size(EXPERTS) if is_sparse else 0,
        num_active=keys.size("num_experts_per_tok") if is_sparse else 0,
        expert_width=keys.size("moe_intermediate_size") if is_sparse else 0,
        shared_width=shared_width(keys, "shared_expert_intermediate_size", 0) if is_sparse else 0,
    )
    shared_gate = hidden if is_sparse else 0
    of_linear = _convolved(linear) * keys.size("linear_conv_kernel_dim", 4)
    of_linear += 2 * linear.num_heads + linear.value_dim  # decay, its offset, a norm
    every = keys.size("full_attention_interval", 4)
    kinds = keys.names("layer_types", count) or [
        "linear_attention" if (at + 1) % every else "full_attention" for at in range(count)
    ]
    layers = [
        LayerShape(
            count=1,
            attention=linear if kind == "linear_attention" else softmax,
            feed_forward=block,
            other_params=shared_gate
            + (of_linear if kind == "linear_attention" else 2 * softmax.head_dim),
        )
        for kind in kinds
    ]
    return keys.model(layers)


def _nemotron_h(keys: ShapeKeys) -> ModelShape:
    """Nemotron-H and Nemotron 3: blocks that are Mamba 2, attention, dense or a mixture."""
    keys.require("vocab_size", "hidden_size", "hybrid_override_pattern|layers_block_type", *_MAMBA)
    blocks = [_KINDS.get(each) for each in _pattern(keys)]
    if None in blocks:
        legal = sorted({key for key in _KINDS if len(key) > 1})
        where, unknown = f"{keys.where}: layers_block_type", _pattern(keys)[blocks.index(None)]
        raise JobError("job/bad-value", where, unknown, "is no kind of block", legal=legal)
    made = {kind: _BLOCKS[kind](keys) for kind in set(blocks) if kind is not None}
    return keys.model([made[kind] for kind in blocks if kind is not None])


def _pattern(keys: ShapeKeys) -> list[str]:
    """A kind for each block: a list, or a text of one letter each."""
    listed = keys.table.get("layers_block_type") or keys.table.get("hybrid_override_pattern")
    if not isinstance(listed, Sequence) or not listed:
        where = f"{keys.where}: hybrid_override_pattern"
        raise JobError("job/bad-value", where, shown(listed), "must name a kind for each block")
    return [str(each) for each in listed]


_NO_ATTENTION = AttentionShape(kind="none", num_heads=1, num_kv_heads=1, head_dim=1)


def _mamba(keys: ShapeKeys) -> LayerShape:
    attention = AttentionShape(
        kind="linear",
        num_heads=keys.size("mamba_num_heads"),
        num_kv_heads=keys.size("n_groups"),
        head_dim=keys.size("ssm_state_size"),
        value_dim=keys.size("mamba_head_dim"),
        is_gated=True,
        head_scalars=1,
    )
    convolved = _convolved(attention) * (keys.size("conv_kernel", 4) + 1)  # and a bias
    small = convolved + 3 * attention.num_heads + attention.value_width  # A, D, dt; a norm
    return LayerShape(
        count=1, attention=attention, feed_forward=FeedForwardShape(), norms=1, other_params=small
    )


def _attention_block(keys: ShapeKeys) -> LayerShape:
    keys.require("num_attention_heads")
    return LayerShape(
        count=1, attention=attention_of(keys), feed_forward=FeedForwardShape(), norms=1
    )


def _dense_block(keys: ShapeKeys) -> LayerShape:
    block = FeedForwardShape(width=keys.size("intermediate_size"), is_gated=False)
    return LayerShape(count=1, attention=_NO_ATTENTION, feed_forward=block, norms=1)


def _expert_block(keys: ShapeKeys) -> LayerShape:
    block = FeedForwardShape(
        is_gated=False,
        num_experts=keys.size("n_routed_experts"),
        num_active=keys.size("num_experts_per_tok"),
        expert_width=keys.size("moe_intermediate_size"),
        shared_width=shared_width(keys, "moe_shared_expert_intermediate_size", 0),
        expert_hidden=keys.size("moe_latent_size", 0, low=0),
    )
    return LayerShape(
        count=1,
        attention=_NO_ATTENTION,
        feed_forward=block,
        norms=1,
        other_params=block.num_experts,
    )


_BLOCKS: dict[str, Callable[[ShapeKeys], LayerShape]] = {
    "M": _mamba, "*": _attention_block, "-": _dense_block, "E": _expert_block,
}  # fmt: skip
HYBRID: dict[str, Callable[[ShapeKeys], ModelShape]] = {
    **{
        kind: _qwen_hybrid
        for kind in ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
    },
    "nemotron_h": _nemotron_h,
}
