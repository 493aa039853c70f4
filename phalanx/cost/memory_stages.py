"""Which layers a pipeline rank of training plans holds. No torch.

Three ranks are told apart, since one of them is the fullest: the first (most micro-batches in
flight, the embedding), the second (may hold a layer more than either end) and the one with the
head (the logits).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.cost.model_shape import ModelShape
from phalanx.cost.training_plans import Column


@dataclass(frozen=True)
class Stage:
    """One pipeline rank of every plan.

    Attributes:
        rank: which [N].
        start, layers: the first of its layers, and how many it holds; chunks of virtual stages
            are taken together.
        has_embedding, has_head: whether it does, 0 or 1.
    """

    rank: Column
    start: Column
    layers: Column
    has_embedding: Column
    has_head: Column

    def shares(self, shape: ModelShape, virtual: Column) -> tuple[Column, Column]:
        """Of all layers without experts, and of all layers with experts.

        Layers of the one kind stand before those of the other where they are not as many (as in
        DeepSeek); else, and between chunks of virtual stages, they are evenly mixed.
        """
        dense = sum(layer.count for layer in shape.layers if not layer.feed_forward.num_experts)
        mixed = shape.num_layers - dense
        even = self.layers / shape.num_layers
        if not dense or not mixed or dense == mixed:
            return even, even
        in_dense = np.clip(self.start + self.layers, 0, dense) - np.clip(self.start, 0, dense)
        in_mixed = (self.layers - in_dense) / mixed
        is_whole = virtual == 1
        return np.where(is_whole, in_dense / dense, even), np.where(is_whole, in_mixed, even)


@dataclass(frozen=True)
class Stages:
    """First, second and head rank of every plan, and whether every rank has work."""

    first: Stage
    second: Stage
    head: Stage
    all_busy: Column


def even_stages(num_layers: int, pipeline: Column, virtual: Column) -> Stages:
    """Equal shares of layers where they divide.

    One less on the first and last rank where that divides (embedding and head count as layers, as
    with Llama 3's 126 layers on 16 x 8 stages); else rounded up.
    """
    count = pipeline * virtual
    rounded = np.minimum(np.ceil(num_layers / count) * virtual, num_layers)
    is_even = num_layers % count == 0
    is_balanced = ~is_even & ((num_layers + 2) % count == 0) & (pipeline > 1)
    middle = np.where(is_even, num_layers / pipeline, rounded)
    middle = np.where(is_balanced, (num_layers + 2) / pipeline, middle)
    ends = middle - is_balanced
    zero, one = np.zeros_like(middle), np.ones_like(middle)
    is_one = (pipeline == 1) * 1.0
    first = Stage(zero, zero, ends, one, is_one)
    second_rank = np.minimum(1, pipeline - 1) + 0.0
    at_end = pipeline <= 2
    after = np.where(is_one, zero, ends)
    second = Stage(second_rank, after, np.where(at_end, ends, middle), is_one, at_end * 1.0)
    head = Stage(pipeline - 1.0, num_layers - ends, ends, is_one, one)
    return Stages(first, second, head, num_layers >= count - 2 * is_balanced)


def stages_by_cost(shape: ModelShape, pipeline: Column) -> Stages:
    """Blocks dealt in order: a rank is closed by the block that takes it past its share.

    The share is that of the parameters that are multiplied with, the head among them; the
    embedding, the last norm, the cast of the logits and the loss are blocks of no cost. A plan
    whose last rank gets none of them cannot run. Source: nanotron's documentation of its pipeline
    division.
    """
    sizes, where = np.unique(pipeline, return_inverse=True)
    dealt = np.array([_deal(shape, int(size)) for size in sizes])[where].T
    in_first, in_second, in_head, head_rank, busy = dealt
    zero, one = np.zeros_like(in_first), np.ones_like(in_first)
    first = Stage(zero, zero, in_first, one, (head_rank == 0) * 1.0)
    second_rank = np.minimum(1, pipeline - 1) + 0.0
    is_one = (pipeline == 1) * 1.0
    after = np.where(is_one, zero, in_first)
    second = Stage(second_rank, after, in_second, is_one, (head_rank == second_rank) * 1.0)
    before = shape.num_layers - in_head
    head = Stage(head_rank, before, in_head, (head_rank == 0) * 1.0, one)
    return Stages(first, second, head, busy > 0)


def _deal(shape: ModelShape, pipeline: int) -> tuple[float, float, float, float, float]:
    """Layers on the first, second and head rank, the head's rank, whether all have a block."""
    matrices = (
        layer.count * product.num_params
        for layer in shape.layers
        for product in layer.products(shape.hidden)
    )
    layer = float(sum(matrices) // shape.num_layers)
    costs = [0.0, *[layer] * shape.num_layers, 0.0, float(shape.vocab * shape.hidden), 0.0, 0.0]
    is_layer = [False, *[True] * shape.num_layers, False, False, False, False]
    head = len(costs) - 3
    done, rank, total = 0.0, 0, sum(costs)
    ranks, layers = [], [0] * pipeline
    for at, cost in enumerate(costs):
        ranks.append(rank)
        layers[rank] += is_layer[at]
        done += cost
        if done > total * (rank + 1) / pipeline and rank < pipeline - 1:
            rank += 1
    second = layers[min(1, pipeline - 1)]
    return layers[0], second, layers[ranks[head]], ranks[head], ranks[-1] == pipeline - 1
