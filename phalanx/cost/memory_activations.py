"""What layers keep for their backward pass, and for how many micro-batches. No torch.

Symbols: D hidden, H, K heads, C head channels, F feed-forward width, E, A experts and those that a
token uses, t tensor degree, p, r pipeline degree and rank, v chunks of a rank, m micro-batches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from phalanx.cost.layer_shape import Adapters
from phalanx.cost.memory_software import MemoryProfile
from phalanx.cost.model_shape import AttentionShape, FeedForwardShape, LayerShape, Product
from phalanx.cost.training_plans import SCHEDULES, Column

ITEM_BYTES = 2.0  # of an activation: bf16 or fp16
_LAST = {"o_proj", "o_a_proj", "o_b_proj"}  # of attention: they read its output, kept in any case


@dataclass(frozen=True)
class LayerBytes:
    """Bytes that layers keep of one token, by what splits them.

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

    def plus(self, other: LayerBytes, times: float = 1.0) -> LayerBytes:
        """The sum with `times` of another."""
        sums = {
            each.name: getattr(self, each.name) + times * getattr(other, each.name)
            for each in fields(self)
        }
        sums["num_shared_heads"] = max(self.num_shared_heads, other.num_shared_heads)
        return LayerBytes(**sums)


def layer_bytes(
    layers: Sequence[LayerShape], hidden: int, profile: MemoryProfile, adapters: Adapters = ""
) -> LayerBytes:
    """Of all given layers.

    For a GPT layer this is 34 D: two norm inputs, two block inputs, queries, keys, values, the
    attention's output, two F wide tensors of 4 D, and two dropout masks (Korthikanti et al.,
    section 4.1); gated blocks keep three F wide tensors, fused attention H sums in fp32. A frozen
    matrix without an adapter needs nothing of what it read.

    Args:
        adapters: "all" matrices have one and are frozen, those of "attention" have, or "" none; or
            names and patterns of those that have.
    """
    copies = profile.adapter_input_bytes if adapters else 0.0
    read = 0.0 if copies else profile.input_bytes
    total = LayerBytes()
    for layer in layers:
        adapted = layer.adapted(hidden, adapters or "all")
        trained = {product.name for product in adapted}
        first = {product.name for product in layer.attention.products(hidden)} - _LAST
        each = _attention(layer.attention, hidden, profile, read if first & trained else 0.0)
        each = each.plus(_feed_forward(layer.feed_forward, hidden, profile, read, trained))
        norms = max(0, layer.norms - 2) * ITEM_BYTES * hidden
        own = LayerBytes(
            stream=norms + profile.dropout_masks * hidden,
            inner=profile.hidden_extra * hidden,
            inputs=ITEM_BYTES * hidden,
        )
        each = each.plus(own).plus(_read_by(adapted), copies)
        total = total.plus(each, layer.count)
    return total


def output_bytes(layers: Sequence[LayerShape], hidden: int, adapters: Adapters = "") -> LayerBytes:
    """Of what trained operators put out, of all given layers: matrices, and norms that are trained.

    Args:
        adapters: as in `layer_bytes`.
    """
    total = LayerBytes()
    for layer in layers:
        stream = inner = routed = routed_inner = 0.0
        for product in layer.adapted(hidden, adapters or "all"):
            elements = ITEM_BYTES * product.outputs * product.active
            is_cut = product.split == "column"
            if product.is_expert:
                routed += elements * (not is_cut)
                routed_inner += elements * is_cut
            else:
                stream += elements * (not is_cut)
                inner += elements * is_cut
        stream += 0.0 if adapters else ITEM_BYTES * hidden * layer.norms
        each = LayerBytes(
            stream=stream, inner=inner, routed_stream=routed, routed_inner=routed_inner
        )
        total = total.plus(each, layer.count)
    return total


def _read_by(products: Iterable[Product]) -> LayerBytes:
    """Elements that matrices read of a token, each on its own."""
    stream = inner = routed = routed_inner = 0.0
    for product in products:
        elements = product.inputs * product.active
        if product.is_expert:
            routed += elements * (product.split != "row")
            routed_inner += elements * (product.split == "row")
        else:
            stream += elements * (product.split != "row")
            inner += elements * (product.split == "row")
    return LayerBytes(stream=stream, inner=inner, routed_stream=routed, routed_inner=routed_inner)


def _attention(
    attention: AttentionShape, hidden: int, profile: MemoryProfile, input_bytes: float
) -> LayerBytes:
    """Norm input, block input, queries, keys, values, the output and its sums."""
    if attention.kind == "none":
        return LayerBytes()
    heads = attention.num_heads if attention.flops_per_pair else 0
    matrix = profile.matrix_bytes * heads
    values = attention.value_width
    queries = attention.num_heads * attention.head_dim
    stream = (ITEM_BYTES + input_bytes) * hidden
    inner = ITEM_BYTES * (queries + (values if attention.is_gated else 0))
    inner += profile.input_bytes * values + (0.0 if matrix else 4.0 * heads)
    if attention.kind == "latent":  # compressed before and after their norms; k, v for every head
        compressed = attention.query_rank + attention.kv_rank
        stream += (ITEM_BYTES + input_bytes) * compressed + ITEM_BYTES * attention.rope_dim
        inner += ITEM_BYTES * (queries + values)
        return LayerBytes(stream=stream, inner=inner, matrix=matrix)
    if attention.kind == "linear":  # queries and keys of K heads, values of every state
        inner += ITEM_BYTES * (2.0 * attention.num_kv_heads * attention.head_dim + values - queries)
        return LayerBytes(stream=stream, inner=inner)
    width = attention.head_dim + (attention.value_dim or attention.head_dim)
    cached = 0 if attention.reuses_keys else attention.num_kv_heads * width
    return LayerBytes(
        stream=stream,
        inner=inner,
        shared_heads=ITEM_BYTES * cached,
        matrix=matrix,
        num_shared_heads=max(1, attention.num_kv_heads),
    )


def _feed_forward(
    block: FeedForwardShape,
    hidden: int,
    profile: MemoryProfile,
    input_bytes: float,
    trained: Collection[str],
) -> LayerBytes:
    """Norm input, block input, what lies between its matrices; tokens sent to experts.

    Args:
        input_bytes: of an element that a matrix among `trained` reads.
    """
    if not block.width and not block.num_experts:
        return LayerBytes()

    def read(*modules: str) -> float:
        return input_bytes if any(module in trained for module in modules) else 0.0

    gated = 2.0 * profile.wide_bytes + profile.wide_extra
    wide = gated if block.is_gated else profile.wide_bytes
    first = ("gate_proj", "up_proj")
    shared_first = tuple(f"shared_experts.{name}" for name in first)
    expert_first = tuple(f"experts.{name}" for name in first)
    inner = (wide + read("down_proj")) * block.width
    if not block.num_experts:
        return LayerBytes(stream=(ITEM_BYTES + read(*first)) * hidden, inner=inner)
    sent = block.expert_hidden or hidden
    read_by_all = read("gate", *first, *shared_first, *expert_first)
    return LayerBytes(
        stream=(ITEM_BYTES + read_by_all) * hidden + 4.0 * block.num_experts,  # fp32 probabilities
        inner=inner + (wide + read("shared_experts.down_proj")) * block.shared_width,
        routed_stream=(ITEM_BYTES + read(*expert_first)) * block.num_active * sent,
        routed_inner=(wide + read("experts.down_proj")) * block.num_active * block.expert_width,
    )


def chunks_in_flight(
    schedule: Column, pipeline: Column, rank: Column, virtual: Column, num_micro: Column
) -> Column:
    """Micro-batches of a whole stage that a pipeline rank holds at its peak.

    GPipe m; 1F1B p - r; interleaved 2(p-r-1) + (v-1)p + 1 chunks of 1/v; zero-bubble p on every
    rank (its weight gradients wait); ZB-V 2p half stages; DualPipe p + 1, DualPipeV 2p + 1 half
    stages; Hanayo (v - 1)p + 1 + r chunks of 1/v. Never more than m.
    Sources: the papers that `training_bubble` names.
    """
    interleaved = (2.0 * (pipeline - rank - 1) + (virtual - 1.0) * pipeline + 1.0) / virtual
    by_name = {
        "gpipe": num_micro + 0.0,
        "1f1b": pipeline - rank + 0.0,
        "interleaved": np.where(virtual > 1, interleaved, pipeline - rank),
        "zero-bubble": pipeline + 0.0,
        "zbv": pipeline + 0.0,
        "dualpipe": pipeline + 1.0,
        "dualpipe-v": pipeline + 0.5,
        "hanayo": ((virtual - 1.0) * pipeline + 1.0 + rank) / virtual,
    }
    held = np.choose(schedule, [np.broadcast_to(by_name[name], rank.shape) for name in SCHEDULES])
    return np.minimum(held, num_micro)


def chunks_waiting(schedule: Column, pipeline: Column, rank: Column, num_micro: Column) -> Column:
    """Micro-batches of a whole stage between their input and their weight gradients at that peak.

    Zero-bubble r + 1, but none on the first rank, whose stage does all in the second pass; ZB-V
    p - 1/2 on the last rank, 1/2 on others; DualPipeV and those that part nothing none.
    Source: the lists of `policies.pipeline` for p = 2, 4, 8, counted.
    """
    later = np.where(rank > 0, rank + 1.0, 0.0)
    folded = np.where((rank == pipeline - 1) & (pipeline > 1), pipeline - 0.5, 0.5)
    waiting = np.where(schedule == SCHEDULES.index("zero-bubble"), later, 0.0)
    waiting = np.where(schedule == SCHEDULES.index("zbv"), folded, waiting)
    return np.minimum(waiting, num_micro)
