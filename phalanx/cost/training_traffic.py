"""Bytes and rounds on links of every collective of a training step, as columns over plans.

Ranks count the tensor axis fastest, then context, data (experts are spread over the ranks of these
three), pipeline slowest [M2, section 3; Megatron Core's order]. So many consecutive ranks share a
scale-up domain; a group that leaves it works hierarchically, as in `cost.collectives`, whose
formulas these are, for arrays.

Symbols: n members of a group, P bytes of the whole tensor on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from phalanx.cost.model_shape import AttentionShape, ModelShape
from phalanx.cost.training_efficiency import has_wide_rings
from phalanx.cost.training_plans import CONTEXT_KINDS, TrainingPlans

ACTIVATION_BYTES = 2
_RING, _ULYSSES = CONTEXT_KINDS.index("ring"), CONTEXT_KINDS.index("ulysses")
_PASSES = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0, "all_to_all": 1.0}


@dataclass(frozen=True)
class Wire:
    """What one rank sends, in a domain and between domains, and in how many rounds."""

    near_bytes: Any = 0.0
    near_rounds: Any = 0.0
    far_bytes: Any = 0.0
    far_rounds: Any = 0.0

    def __add__(self, other: Wire) -> Wire:
        mine, theirs = vars(self).values(), vars(other).values()
        return Wire(*(a + b for a, b in zip(mine, theirs, strict=True)))

    def times(self, factor: Any) -> Wire:
        """The same so many times."""
        return Wire(*(value * factor for value in vars(self).values()))

    def resized(self, factor: Any) -> Wire:
        """With so many times the bytes, in as many rounds."""
        return replace(self, near_bytes=self.near_bytes * factor, far_bytes=self.far_bytes * factor)


def collective(kind: str, payload_bytes: Any, n: Any, stride: Any, domain: int) -> Wire:
    """A collective of n ranks that stand `stride` apart; domains hold `domain` ranks.

    Rounds: n - 1 in a domain (a ring); between domains log2, which libraries reach with trees.
    """
    n, stride = np.asarray(n, dtype=float), np.asarray(stride, dtype=float)
    inside = np.clip(np.floor(domain / stride), 1.0, n)
    outside = np.ceil(n / inside)
    passes = _PASSES[kind]
    outer_bytes = payload_bytes if kind == "all_to_all" else payload_bytes / inside
    return Wire(
        passes * payload_bytes * (inside - 1) / inside,
        passes * (inside - 1),
        passes * outer_bytes * (outside - 1) / outside,
        passes * np.ceil(np.log2(outside)),
    )


def point_to_point(payload_bytes: Any, distance: Any, domain: int) -> Wire:
    """One message to the rank that stands `distance` away."""
    is_near = np.asarray(distance) < domain
    return Wire(
        np.where(is_near, payload_bytes, 0.0),
        np.where(is_near, 1.0, 0.0),
        np.where(is_near, 0.0, payload_bytes),
        np.where(is_near, 0.0, 1.0),
    )


@dataclass(frozen=True)
class Traffic:
    """Of one rank.

    Attributes:
        tensor, context, expert: of a mean layer's forward pass of one micro-batch.
        context_backward: of its backward pass (that of the others equals the forward one).
        edge: of the tensor axis at embedding and head, of one micro-batch.
        pipeline: of one message between stages.
        gather: of all weights that a rank holds, once.
        reduce: of all gradients that it holds, once, in elements instead of bytes.
    """

    tensor: Wire
    context: Wire
    context_backward: Wire
    expert: Wire
    edge: Wire
    pipeline: Wire
    gather: Wire
    reduce: Wire


class Held(NamedTuple):
    """Parameters of a rank before they are sharded: of all that is no expert, and of experts."""

    dense: Any
    experts: Any


def traffic_of(
    shape: ModelShape, plans: TrainingPlans, domain: int, gathered: Held, trained: Held
) -> Traffic:
    """Count what a rank sends; domains hold `domain` ranks.

    Args:
        gathered: weights in bytes that sharing ranks gather.
        trained: parameters whose gradients are summed.
    """
    row_bytes = plans.rank_tokens * shape.hidden * ACTIVATION_BYTES
    all_reduce = collective("all_reduce", row_bytes, plans.tensor, 1, domain)
    stage_stride = plans.tensor * plans.context * plans.data
    cut = np.where(plans.sequence_parallel > 0, plans.tensor, 1)
    context, context_backward = _context(shape, plans, domain)
    return Traffic(
        tensor=all_reduce.times(tensor_blocks(shape, plans)),
        context=context,
        context_backward=context_backward,
        expert=_expert(shape, plans, domain),
        edge=all_reduce.times(2.0),
        pipeline=point_to_point(row_bytes / cut, stage_stride, domain),
        gather=_gather(plans, domain, gathered),
        reduce=_reduce(plans, domain, trained),
    )


def tensor_blocks(shape: ModelShape, plans: TrainingPlans) -> Any:
    """All-reduces of a mean layer forward: one after attention, one after a block that is cut."""
    total: Any = 0.0
    for layer in shape.layers:
        ffn = layer.feed_forward
        after = 1.0 if layer.attention.kind != "none" else 0.0
        is_dense = bool(ffn.width or (ffn.shared_width and ffn.num_experts))
        is_cut = np.where(plans.expert_tensor > 1, 1.0, 0.0) if ffn.num_experts else 0.0
        total = total + layer.count * (after + np.maximum(1.0 if is_dense else 0.0, is_cut))
    return total / shape.num_layers


def _context(shape: ModelShape, plans: TrainingPlans, domain: int) -> tuple[Wire, Wire]:
    """All-gather or ring: keys and values of the whole row forward, and once more with their
    gradients backward (twice the bytes of the keys where a ring carries them in float32); Ulysses:
    queries, keys, values and results, four all-to-alls each way."""
    cached = sum(layer.count * _key_values(layer.attention) for layer in shape.layers)
    queries = sum(layer.count * 2 * layer.attention.value_width for layer in shape.layers)
    each = plans.micro_tokens * ACTIVATION_BYTES / plans.tensor / shape.num_layers
    keys = each * cached
    moved = each * (queries + cached) / plans.context
    gather = collective("all_gather", keys, plans.context, plans.tensor, domain)
    exchange = collective("all_to_all", moved, plans.context, plans.tensor, domain)
    is_exchange = np.where(plans.context_kind == _ULYSSES, 1.0, 0.0)
    forward = gather.times(1 - is_exchange) + exchange.times(is_exchange)
    is_wide = (plans.context_kind == _RING) & has_wide_rings(plans.software)
    again = np.where(is_wide, 3.0, 2.0)
    backward = gather.times(again * (1 - is_exchange)) + exchange.times(is_exchange)
    return forward, backward


def _key_values(attention: AttentionShape) -> int:
    """Elements of keys and values per token, as they travel (latent attention: expanded)."""
    if attention.kind in ("none", "linear") or attention.reuses_keys:
        return 0
    heads = attention.num_heads if attention.kind == "latent" else attention.num_kv_heads
    return heads * (attention.head_dim + (attention.value_dim or attention.head_dim))


def _expert(shape: ModelShape, plans: TrainingPlans, domain: int) -> Wire:
    """Dispatch and combine of a mean layer: every token to its experts and back.

    A token crosses to a domain once, whatever number of its experts is there; of k experts spread
    over n domains it needs n (1 - (1 - 1 / n)^k), on average.
    """
    tokens = plans.rank_tokens * plans.expert_tensor / plans.tensor * plans.expert_imbalance
    total = Wire()
    for layer in shape.layers:
        ffn = layer.feed_forward
        if not ffn.num_experts:
            continue
        each = tokens * (ffn.expert_hidden or shape.hidden) * ACTIVATION_BYTES
        inside = np.clip(np.floor(domain / plans.expert_tensor), 1.0, plans.expert)
        outside = np.ceil(plans.expert / inside)
        crossing = outside * (1 - (1 - 1 / outside) ** ffn.num_active)
        both = Wire(
            each * ffn.num_active * (inside - 1) / inside,
            inside - 1,
            each * crossing * (outside - 1) / outside,
            np.ceil(np.log2(outside)),
        )
        total = total + both.times(2.0 * layer.count / shape.num_layers)
    return total


def sharing_ranks(plans: TrainingPlans) -> tuple[tuple[Any, Any, Any], tuple[Any, Any, Any]]:
    """(ranks, those of them that share, stride) of what is no expert, and of experts."""
    ranks = plans.data * plans.context
    shared = np.where(plans.zero > 0, np.minimum(plans.shard, ranks), 1)
    stride = plans.expert * plans.expert_tensor
    expert_ranks = np.maximum(ranks * plans.tensor / stride, 1.0)
    expert_shared = np.clip(shared * expert_ranks / ranks, 1.0, expert_ranks)
    return (ranks, shared, plans.tensor), (expert_ranks, expert_shared, stride)


def _gather(plans: TrainingPlans, domain: int, held: Held) -> Wire:
    total = Wire()
    for payload, (_, shared, stride) in zip(held, sharing_ranks(plans), strict=True):
        total = total + collective("all_gather", payload, shared, stride, domain)
    return total


def _reduce(plans: TrainingPlans, domain: int, held: Held) -> Wire:
    """Scattered over ranks that share, then summed over the replicas."""
    total = Wire()
    for payload, (ranks, shared, stride) in zip(held, sharing_ranks(plans), strict=True):
        replicas = np.maximum(ranks / shared, 1.0)
        scatter = collective("reduce_scatter", payload, shared, stride, domain)
        between = collective("all_reduce", payload / shared, replicas, stride * shared, domain)
        total = total + scatter + between
    return total
