"""What layers keep for their backward pass, and for how many micro-batches. No torch.

Symbols: D hidden, H, K heads, C head channels, F feed-forward width, E, A experts and those that a
token uses, t tensor degree, p, r pipeline degree and rank, v chunks of a rank, m micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.cost.memory_software import MemoryProfile
from phalanx.cost.model_shape import AttentionShape, FeedForwardShape, ModelShape
from phalanx.cost.training_plans import SCHEDULES, Column

ITEM_BYTES = 2.0  # of an activation: bf16 or fp16


@dataclass(frozen=True)
class LayerBytes:
    """Bytes that all layers keep of one token, by what splits them.

    Attributes:
        stream: between blocks, D wide: split over the tensor axis by sequence parallelism alone.
        inner: inside blocks: split over the tensor axis.
        shared_heads: keys and values: split over at most `num_shared_heads` tensor ranks.
        routed_stream, routed_inner: of tokens sent to experts; a token counts A times.
        matrix: of a pair of tokens, where attention writes its matrix.
        inputs: the layers' inputs alone.
    """

    stream: float = 0.0
    inner: float = 0.0
    shared_heads: float = 0.0
    routed_stream: float = 0.0
    routed_inner: float = 0.0
    matrix: float = 0.0
    inputs: float = 0.0
    num_shared_heads: int = 1


def layer_bytes(shape: ModelShape, profile: MemoryProfile) -> LayerBytes:
    """Of all layers of a model.

    For a GPT layer this is 34 D: two norm inputs, two block inputs, queries, keys, values, the
    attention's output, two F wide tensors of 4 D, and two dropout masks (Korthikanti et al.,
    section 4.1); gated blocks keep three F wide tensors, fused attention H sums in fp32.
    """
    totals = dict.fromkeys(("stream", "inner", "shared", "routed", "hidden", "matrix"), 0.0)
    for layer in shape.layers:
        stream, inner, shared = _attention(layer.attention, shape.hidden)
        block_stream, block_inner, routed, hidden = _feed_forward(layer.feed_forward, shape.hidden)
        extra_norms = max(0, layer.norms - 2) * ITEM_BYTES * shape.hidden
        masks = profile.dropout_masks * shape.hidden
        heads = layer.attention.num_heads if layer.attention.flops_per_pair else 0
        matrix = profile.keeps_attention_matrix
        totals["stream"] += layer.count * (stream + block_stream + extra_norms + masks)
        inner += profile.hidden_extra * shape.hidden + (0.0 if matrix else 4.0 * heads)
        totals["inner"] += layer.count * (inner + block_inner)
        totals["shared"] += layer.count * shared
        totals["routed"] += layer.count * routed
        totals["hidden"] += layer.count * hidden
        totals["matrix"] += layer.count * (5.0 * heads if matrix else 0.0)
    return LayerBytes(
        totals["stream"],
        totals["inner"],
        totals["shared"],
        totals["routed"],
        totals["hidden"],
        totals["matrix"],
        inputs=ITEM_BYTES * shape.hidden * shape.num_layers,
        num_shared_heads=max(1, max(layer.attention.num_kv_heads for layer in shape.layers)),
    )


def _attention(attention: AttentionShape, hidden: int) -> tuple[float, float, float]:
    """(stream, inner, keys and values) bytes of a token: norm input, block input, q, k, v, out."""
    if attention.kind == "none":
        return 0.0, 0.0, 0.0
    queries = attention.num_heads * attention.head_dim
    values = attention.value_width
    gate = values if attention.is_gated else 0
    stream = 2.0 * hidden
    if attention.kind == "latent":  # compressed before and after their norms; k, v for every head
        stream += 2.0 * (attention.query_rank + attention.kv_rank) + attention.rope_dim
        return ITEM_BYTES * stream, ITEM_BYTES * (2.0 * queries + 2.0 * values + gate), 0.0
    cached = attention.num_kv_heads * (
        attention.head_dim + (attention.value_dim or attention.head_dim)
    )
    return ITEM_BYTES * stream, ITEM_BYTES * (queries + values + gate), ITEM_BYTES * cached


def _feed_forward(block: FeedForwardShape, hidden: int) -> tuple[float, float, float, float]:
    """(stream, inner, routed stream, routed inner) bytes of a token."""
    if not block.width and not block.num_experts:
        return 0.0, 0.0, 0.0, 0.0
    wide = 3.0 if block.is_gated else 2.0
    inner = wide * (block.width + block.shared_width)
    router = 4.0 * block.num_experts  # probabilities in fp32
    routed = 2.0 * block.num_active * hidden if block.num_experts else 0.0  # sent and come back
    return (
        ITEM_BYTES * 2.0 * hidden + router,
        ITEM_BYTES * inner,
        ITEM_BYTES * routed,
        ITEM_BYTES * wide * block.num_active * block.expert_width,
    )


def chunks_in_flight(
    schedule: Column, pipeline: Column, rank: Column, virtual: Column, num_micro: Column
) -> Column:
    """Micro-batches of a whole stage that a pipeline rank holds at its peak.

    GPipe m; 1F1B p - r; interleaved 2(p-r-1) + (v-1)p + 1 chunks of 1/v; zero-bubble p on every
    rank (its weight gradients wait); ZB-V 2p half stages; DualPipe p + 1. Never more than m.
    Sources: the sheets of Megatron-LM, zero bubble and DualPipe.
    """
    interleaved = (2.0 * (pipeline - rank - 1) + (virtual - 1.0) * pipeline + 1.0) / virtual
    by_name = {
        "gpipe": num_micro + 0.0,
        "1f1b": pipeline - rank + 0.0,
        "interleaved": np.where(virtual > 1, interleaved, pipeline - rank),
        "zero-bubble": pipeline + 0.0,
        "zbv": pipeline + 0.0,
        "dualpipe": pipeline + 1.0,
    }
    held = np.choose(schedule, [np.broadcast_to(by_name[name], rank.shape) for name in SCHEDULES])
    return np.minimum(held, num_micro)
