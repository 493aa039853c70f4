"""What a rank computes in a micro-batch, as columns over plans: FLOPs, bytes, launches.

All columns are of a mean layer, of one micro-batch, forward, unless the name says otherwise; the
rank is one that holds layers only. They are sums, so that `training_step` prices ten thousand plans
in a few operations:

    seconds of a matrix product of m x k and k x n   2 m n k / rate + bytes / bandwidth + start
    bytes                                            m k + k n + m n elements

which makes its efficiency a saturating function of m, n and k, each by itself. Tokens m are those
of the rank, sizes n and k what the tensor axis leaves; an expert sees
    m = rank tokens * A / E * ep * etp / tp
tokens on average (A of E experts active, ep ranks share the experts, etp the tensor degree in one).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.cost.model_shape import AttentionShape, LayerShape, ModelShape, Product
from phalanx.cost.training_plans import TrainingPlans

_STREAM_BYTES = 2  # activations of everything but products
_MASTER_BYTES = 8  # a weight gradient is read and added in float32
_OPERATORS = 8  # launches of a layer beside products: norms, rotation, attention, gate, residuals
_ADAPTER_LAUNCHES = 3  # of an adapted product: two products and a sum


@dataclass(frozen=True)
class ComputeWork:
    """Columns [N] or numbers, as the module says.

    Attributes:
        product_flops, product_bytes, products: of matrices that every token uses; their launches.
        weight_bytes: more bytes of their weight gradients.
        expert_flops, expert_bytes, experts, expert_weight_bytes: the same of experts.
        adapter_flops, adapter_bytes, adapters: of LoRA.
        attention_flops: of the pairs of tokens that attend.
        attention_per_token: FLOPs that each token would cost if it saw one token.
        state_flops: of linear attention.
        score_bytes: that attention moves when its scores are written out (full square).
        stream_bytes: of norms, gates, residuals, rotation.
        routed_bytes: of bringing tokens into the order of their experts, and back.
        cast_bytes: of inputs of products that a narrow format converts, read and written.
        gated_cast_bytes: of inputs and results of experts with a gate, which libraries convert,
            gate and permute in one kernel or in many.
        launches: operators started by the host.
        head_flops, head_bytes, logit_bytes: of the head and the loss, of one micro-batch.
        dense_params, expert_params: of a mean layer on this rank.
        edge_params: of the embedding or the head on a rank that has it.
        trained_params: of adapters in a mean layer on this rank (LoRA only).
    """

    product_flops: Any
    product_bytes: Any
    products: Any
    weight_bytes: Any
    expert_flops: Any
    expert_bytes: Any
    experts: Any
    expert_weight_bytes: Any
    adapter_flops: Any
    adapter_bytes: Any
    adapters: Any
    attention_flops: Any
    attention_per_token: Any
    state_flops: Any
    score_bytes: Any
    stream_bytes: Any
    routed_bytes: Any
    cast_bytes: Any
    gated_cast_bytes: Any
    launches: Any
    head_flops: Any
    head_bytes: Any
    logit_bytes: Any
    dense_params: Any
    expert_params: Any
    edge_params: Any
    trained_params: Any


def compute_work(shape: ModelShape, plans: TrainingPlans) -> ComputeWork:
    """Count the work of a rank; see `ComputeWork`."""
    total: dict[str, Any] = {}
    for layer in shape.layers:
        for name, value in _layer(shape, layer, plans).items():
            total[name] = total.get(name, 0.0) + layer.count * value
    mean = {name: value / shape.num_layers for name, value in total.items()}
    return ComputeWork(**mean, **_head(shape, plans))


def _layer(shape: ModelShape, layer: LayerShape, plans: TrainingPlans) -> dict[str, Any]:
    counted: dict[str, Any] = dict.fromkeys(_PRODUCT_COLUMNS, 0.0)
    adapted = set(layer.adapted(shape.hidden, plans.lora_targets or "all"))
    for product in layer.products(shape.hidden):
        is_gated, is_adapted = layer.feed_forward.is_gated, product in adapted
        for name, value in _product(product, plans, is_gated, is_adapted).items():
            counted[name] = counted[name] + value
    products = counted["products"] + counted["experts"]
    counted |= _attention(layer.attention, plans)
    counted["stream_bytes"] = _stream(shape.hidden, layer, plans)
    counted["routed_bytes"] = _routed(shape.hidden, layer, plans)
    counted["launches"] = products + _OPERATORS + _ADAPTER_LAUNCHES * counted["adapters"] / 2
    counted["dense_params"] = counted["dense_params"] + layer.norms * shape.hidden
    return counted


_PRODUCT_COLUMNS = (
    *("product_flops", "product_bytes", "products", "weight_bytes"),
    *("expert_flops", "expert_bytes", "experts", "expert_weight_bytes"),
    *("adapter_flops", "adapter_bytes", "adapters", "cast_bytes"),
    "gated_cast_bytes",
    *("dense_params", "expert_params", "trained_params"),
)


def _product(
    product: Product, plans: TrainingPlans, is_gated: bool, is_adapted: bool
) -> dict[str, Any]:
    """Columns that one matrix (or all its copies) of a gated block, or another, adds to."""
    tokens, inputs, outputs, held = _local_sizes(product, plans)
    element_bytes = {"fp8": 1.0, "fp4": 0.5}.get(plans.precision, 2.0)
    flops = 2.0 * held * tokens * inputs * outputs
    read = held * (tokens * inputs + inputs * outputs) * element_bytes
    moved = read + held * tokens * outputs * _STREAM_BYTES
    weights = held * inputs * outputs
    found: dict[str, Any] = {"cast_bytes": held * tokens * inputs * (2 + 2 * element_bytes)}
    if product.is_expert and is_gated:
        found["gated_cast_bytes"] = held * tokens * (inputs + outputs) * (2 + 2 * element_bytes)
    if product.is_expert:
        found |= {"expert_flops": flops * plans.expert_imbalance, "expert_bytes": moved}
        found |= {"experts": 1.0, "expert_weight_bytes": weights * _MASTER_BYTES}
        found["expert_params"] = weights
    else:
        found |= {"product_flops": flops, "product_bytes": moved, "products": 1.0}
        found |= {"weight_bytes": weights * _MASTER_BYTES, "dense_params": weights}
    is_adapted &= not product.is_expert and product.name != "gate"
    if plans.method == "lora" and is_adapted:
        rank = plans.lora_rank
        found["adapter_flops"] = 2.0 * tokens * rank * (inputs + outputs)
        found["adapter_bytes"] = tokens * (inputs + 3 * outputs + 2 * rank) * _STREAM_BYTES
        found["adapters"] = 2.0
        found["trained_params"] = rank * (inputs + outputs)
    return found


def _local_sizes(product: Product, plans: TrainingPlans) -> tuple[Any, Any, Any, Any]:
    """(tokens, inputs, outputs, copies) of a rank."""
    tokens: Any = plans.rank_tokens
    cut: Any = plans.tensor
    held: Any = 1.0
    if product.is_expert:
        cut = plans.expert_tensor
        share = product.active / product.copies * plans.expert * cut / plans.tensor
        tokens, held = tokens * share, product.copies / plans.expert
    if product.split == "column":
        return tokens, product.inputs, product.outputs / cut, held
    if product.split == "row":
        return tokens, product.inputs / cut, product.outputs, held
    apart = np.where(plans.sequence_parallel > 0, plans.tensor, 1)
    return tokens / apart, product.inputs, product.outputs, held


def _attention(attention: AttentionShape, plans: TrainingPlans) -> dict[str, Any]:
    tokens = plans.rank_tokens / plans.tensor
    documents = np.asarray(plans.document_tokens, dtype=float)
    seen = _mean_seen(documents, attention)
    scores = tokens * attention.num_heads * documents * _STREAM_BYTES
    return {
        "attention_flops": tokens * attention.flops_per_pair * seen,
        "attention_per_token": tokens * attention.flops_per_pair,
        "state_flops": tokens * attention.state_flops_per_token,
        "score_bytes": scores * (attention.flops_per_pair > 0),
    }


def _mean_seen(document_tokens: Any, attention: AttentionShape) -> Any:
    """Keys that a query sees, on average: half a document; a window w sees w (1 - w / 2d)."""
    seen = document_tokens / 2
    for limit in (attention.window, attention.chosen_tokens):
        if limit:
            within = np.minimum(limit, document_tokens)
            seen = np.minimum(seen, within * (1 - within / (2 * document_tokens)))
    return seen


def _stream(hidden: int, layer: LayerShape, plans: TrainingPlans) -> Any:
    """Norms read and write D, residual sums read two and write one; gates 3 F; rotation reads and
    writes queries and keys."""
    apart = np.where(plans.sequence_parallel > 0, plans.tensor, 1)
    attention, ffn = layer.attention, layer.feed_forward
    whole = hidden * (2 * layer.norms + 6) / apart
    heads = attention.num_heads + attention.num_kv_heads
    rotated = 2 * heads * attention.head_dim
    gated = (3 if ffn.is_gated else 2) * (ffn.width + ffn.shared_width)
    inside = ffn.num_active * 3 * ffn.expert_width
    each = whole + (rotated + gated + inside) / plans.tensor
    return plans.rank_tokens * each * _STREAM_BYTES


def _routed(hidden: int, layer: LayerShape, plans: TrainingPlans) -> Any:
    """Tokens are put in the order of their experts and back: each read and written twice."""
    ffn = layer.feed_forward
    width = ffn.num_active * (ffn.expert_hidden or hidden)
    return plans.rank_tokens / plans.tensor * width * 4 * _STREAM_BYTES


def _head(shape: ModelShape, plans: TrainingPlans) -> dict[str, Any]:
    tokens = plans.rank_tokens * plans.counted_frac
    outputs = shape.vocab / plans.tensor
    weights = shape.hidden * outputs
    moved = (tokens * shape.hidden + weights + tokens * outputs) * _STREAM_BYTES
    return {
        "head_flops": 2.0 * tokens * weights,
        "head_bytes": moved,
        # logits: written, read and written as float32 for the loss, read for its gradient
        "logit_bytes": tokens * outputs * 16.0,
        "edge_params": weights,
    }
