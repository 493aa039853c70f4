"""Weights, gradients and optimizer states of a rank of training plans. No torch.

Symbols: t tensor, p pipeline, e expert degree, f ranks that share states (`shard`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from phalanx.cost.layer_shape import Adapters
from phalanx.cost.memory_software import MemoryProfile
from phalanx.cost.model_shape import LayerShape, ModelShape, Product
from phalanx.cost.training_plans import SCHEDULES, Column

QUANTISED_OVERHEAD = 0.127 / 4  # bits of scales over the 4 of a weight (QLoRA, arXiv 2305.14314)
ITEM_BYTES = 2.0  # of a weight as products read it

Shares = tuple[Column, Column]  # of all layers without experts, of all with


@dataclass(frozen=True)
class Parameters:
    """Parameters of a rank by class, [N] each.

    Attributes:
        dense, expert: in layers; embedding: in tables and the head; all before sharding.
        largest, largest_expert: of the largest layer, the unit that is gathered.
    """

    dense: Column
    expert: Column
    embedding: Column
    largest: Column
    largest_expert: Column


def split_params(
    shape: ModelShape,
    columns: Mapping[str, Column],
    shares: Shares,
    tables: Column,
    has_embedding: Column,
) -> Parameters:
    """Of a rank with such shares of the layers and so many tables of V rows."""
    tensor, experts = columns["tensor"], columns["expert"] * columns["expert_tensor"]
    zeros = np.zeros(tables.shape)
    dense, expert, largest, largest_expert = zeros, zeros, zeros, zeros
    for layer in shape.layers:
        in_dense = layer.norms * shape.hidden + layer.other_params + zeros
        in_expert = zeros
        for product in layer.products(shape.hidden):
            if product.is_expert:
                in_expert = in_expert + product.num_params / experts
            else:
                in_dense = in_dense + product.num_params / _cut(product, layer, tensor)
        held = layer.count * _share(shares, layer)
        dense, expert = dense + held * in_dense, expert + held * in_expert
        bigger = in_dense + in_expert > largest + largest_expert
        largest = np.where(bigger, in_dense, largest)
        largest_expert = np.where(bigger, in_expert, largest_expert)
    table = shape.vocab * shape.hidden / tensor
    others = shape.learned_positions * shape.hidden + shape.other_params
    embedding = tables * table + has_embedding * others + shape.hidden
    return Parameters(dense, expert, embedding, largest, largest_expert)


def _share(shares: Shares, layer: LayerShape) -> Column:
    """Of layers like this one."""
    return shares[1 if layer.feed_forward.num_experts else 0]


def _cut(product: Product, layer: LayerShape, tensor: Column) -> Column:
    """Ranks that a matrix is split over: keys and values over no more than they have heads."""
    if product.split == "none":
        return np.ones_like(tensor)
    if product.name in ("k_proj", "v_proj"):
        return np.minimum(tensor, layer.attention.num_kv_heads)
    return tensor


def adapter_params(
    shape: ModelShape, columns: Mapping[str, Column], rank: int, targets: Adapters, shares: Shares
) -> tuple[Column, Column]:
    """(dense, expert) parameters of rank R factors on the target layers, before sharding."""
    tensor, experts = columns["tensor"], columns["expert"] * columns["expert_tensor"]
    dense, expert = np.zeros(tensor.shape), np.zeros(tensor.shape)
    for layer in shape.layers:
        held = layer.count * _share(shares, layer)
        for product in layer.adapted(shape.hidden, targets):
            inputs = product.inputs / (tensor if product.split == "row" else 1.0)
            outputs = product.outputs / (tensor if product.split == "column" else 1.0)
            if product.is_expert:
                both = product.inputs + product.outputs
                expert = expert + held * product.copies * rank * both / experts
            else:
                dense = dense + held * rank * (inputs + outputs)
    return dense, expert


@dataclass(frozen=True)
class States:
    """Bytes of a rank [N].

    `late`: what is more than `gathered` once all activations are gone, as the root is reduced.
    """

    weights: Column
    gradients: Column
    moments: Column
    gathered: Column
    late: Column
    host: Column


def state_bytes(
    shape: ModelShape,
    columns: Mapping[str, Column],
    profile: MemoryProfile,
    *,
    shares: Shares,
    tables: Column,
    has_embedding: Column,
    method: str,
    lora_rank: int,
    lora_targets: tuple[str, ...],
    base_bits: int,
) -> States:
    """Of ranks that hold such shares of the layers and so many tables."""
    params = split_params(shape, columns, shares, tables, has_embedding)
    shard, expert_shard = shard_degrees(columns)
    copies = np.where(columns["schedule"] == SCHEDULES.index("dualpipe"), 2.0, 1.0)
    zero = columns["zero"]
    dense, expert = params.dense + params.embedding, params.expert

    def cut(in_dense: Column, in_expert: Column, stage: int) -> Column:
        at_least = zero >= stage
        held = in_dense / np.where(at_least, shard, 1.0)
        return held + in_expert / np.where(at_least, expert_shard, 1.0)

    is_lora = method == "lora"
    stored = profile.weight_bytes
    if is_lora:
        quantised = base_bits / 8.0 * (1.0 + QUANTISED_OVERHEAD)
        stored = quantised if base_bits < 16 else profile.frozen_bytes
        targets = lora_targets or profile.adapters
        trained = adapter_params(shape, columns, lora_rank, targets, shares)
    else:
        trained = (dense, expert)
    weights = copies * cut(dense, expert, 3) * stored
    if is_lora:
        weights = weights + copies * cut(*trained, 3) * profile.weight_bytes
    on_device = 1.0 - columns["offload"]
    optimizer = profile.moment_bytes + profile.master_bytes
    moments = cut(*trained, 1) * optimizer * copies
    gradients = copies * cut(*trained, 2) * profile.grad_bytes
    is_exchanged = columns["data"] * columns["context"] > 1
    gradients = gradients + np.where(is_exchanged, sum(trained) * profile.bucket_bytes, 0.0)
    per_gathered = min(stored, profile.gathered_bytes)
    units = 1.0 + profile.prefetched_units
    unit = profile.unit_frac * (params.largest + params.largest_expert)
    root = profile.unit_frac * params.embedding  # never given up between the passes
    whole = np.where(columns["keeps_gathered"] > 0, params.dense + expert, units * unit)
    gathered = (whole + root) * per_gathered
    copied = 0.0 if is_lora else ITEM_BYTES + profile.grad_bytes  # a gradient while it is reduced
    unreduced, late = np.maximum(unit, root) * copied, np.zeros(root.shape)
    if profile.head_bytes and not is_lora:
        head = params.embedding / np.maximum(tables, 1.0)
        unreduced = np.maximum(unit * copied, head * profile.head_bytes)
        late = np.maximum(0.0, root * copied - unreduced - units * unit * per_gathered)
    dequantised = unit * ITEM_BYTES if is_lora and base_bits < 16 else 0.0
    return States(
        weights=weights,
        gradients=gradients,
        moments=moments * on_device,
        gathered=np.where(zero >= 3, gathered + unreduced, 0.0) + dequantised,
        late=np.where(zero >= 3, late, 0.0),
        host=moments * columns["offload"],
    )


def shard_degrees(columns: Mapping[str, Column]) -> tuple[Column, Column]:
    """Ranks that share the states of dense and of expert parameters.

    An expert has t / (e t_e) as many data ranks as the rest.
    """
    shard = columns["shard"]
    cut = columns["expert"] * columns["expert_tensor"] / columns["tensor"]
    return shard + 0.0, np.maximum(1.0, shard / cut)
