"""What serving a token of a model costs, as columns: one row per model, or per plan of many models.

A step of an engine reads each weight once whatever the batch, multiplies every token with the ones
it uses, and reads what is cached of every row: so a price needs a dozen sums over the layers, and
thousands of plans of different models are priced as arrays.

Symbols: D hidden size, V vocabulary, E experts, A experts that a token uses, K kinds of attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from phalanx.cost.model_shape import AttentionShape, ModelShape, Product

Column = np.ndarray  # [N]; [N, K] where it is of kinds of attention


@dataclass(frozen=True, kw_only=True)
class AttentionWork:
    """Kinds of attention of a model, [N, K]; kinds that a model lacks have count 0.

    Attributes:
        count: layers of the kind.
        cached: elements that a layer keeps of a token, without keys of an index.
        shards: tensor ranks that share them: key heads, or 1 for a latent, which each rank reads.
        window: tokens that a layer keeps at most (inf: all).
        limit: tokens that a query sees at most: of a window, or those that an index picks.
        index: elements of a token that the index reads, of all tokens kept, on every rank.
        index_flops: forward FLOPs of the index for a query and a key.
        prefill_flops: forward FLOPs of a query and a key in a prompt.
        decode_flops: in decoding; a latent attention works on the latents themselves there
            ("absorbed": 2 H (2 kv_rank + rope_dim)).
        state: elements of a linear attention's state, per sequence.
        state_flops: of a token's update and read of it.
    """

    count: Column
    cached: Column
    shards: Column
    window: Column
    limit: Column
    index: Column
    index_flops: Column
    prefill_flops: Column
    decode_flops: Column
    state: Column
    state_flops: Column


@dataclass(frozen=True, kw_only=True)
class ServingWork:
    """Sums over the layers of N models.

    Attributes:
        layers, hidden, vocab: L, D, V.
        attention_params, dense_params: in products that tensor parallelism cuts: of attention, and
            of feed-forward blocks without experts (shared experts included).
        whole_params: in products that every tensor rank holds (routers, latent down-projections).
        expert_params: of all experts of all layers.
        expert_flops: forward FLOPs of a token in experts.
        experts, active: E and A (1 and 1 without experts).
        expert_layers, latent_layers, linear_layers, index_layers: layers of these kinds.
        kinds: of attention.
    """

    layers: Column
    hidden: Column
    vocab: Column
    attention_params: Column
    dense_params: Column
    whole_params: Column
    expert_params: Column
    expert_flops: Column
    experts: Column
    active: Column
    expert_layers: Column
    latent_layers: Column
    linear_layers: Column
    index_layers: Column
    kinds: AttentionWork

    def kept_per_token(self, shards: Column | float, context: Column | float) -> Column:
        """Elements that one rank of `shards` keeps of each of `context` tokens of a request.

        Averaged over the context: layers with a window count with the share that they keep.
        """
        kinds = self.kinds
        share = np.minimum(_wide(context), kinds.window) / np.maximum(_wide(context), 1.0)
        each = kinds.cached / np.minimum(_wide(shards), kinds.shards) + kinds.index
        return (kinds.count * each * share).sum(axis=-1)

    def read_per_row(self, shards: Column | float, context: Column | float) -> Column:
        """Elements of the cache that one rank reads for a token of a request of that length."""
        kinds = self.kinds
        seen = np.minimum(_wide(context), kinds.limit)
        each = seen * kinds.cached / np.minimum(_wide(shards), kinds.shards)
        return (kinds.count * (each + _wide(context) * kinds.index)).sum(axis=-1)


def work_of(shape: ModelShape) -> ServingWork:
    """The sums of one model, as columns of one row."""
    sums = dict.fromkeys(("attention", "dense", "whole", "expert"), 0.0)
    expert_flops = 0.0
    for layer in shape.layers:
        for product in layer.products(shape.hidden):
            sums[_part(product)] += layer.count * product.num_params
            expert_flops += layer.count * product.flops_per_token * product.is_expert
    routed = [layer for layer in shape.layers if layer.feed_forward.num_experts > 1]
    numbers = {
        "layers": shape.num_layers,
        "hidden": shape.hidden,
        "vocab": shape.vocab,
        **{f"{name}_params": total for name, total in sums.items()},
        "expert_flops": expert_flops,
        "experts": max((layer.feed_forward.num_experts for layer in routed), default=1),
        "active": max((layer.feed_forward.num_active for layer in routed), default=1),
        "expert_layers": sum(layer.count for layer in routed),
        "latent_layers": _count(shape, "latent"),
        "linear_layers": _count(shape, "linear"),
        "index_layers": sum(each.count for each in shape.layers if each.attention.index_heads),
    }
    columns = {name: np.asarray([value], dtype=float) for name, value in numbers.items()}
    return ServingWork(**columns, kinds=_kinds(shape))


def stack_work(works: Sequence[ServingWork]) -> ServingWork:
    """Rows of several models below each other."""
    most = max(work.kinds.count.shape[-1] for work in works)
    kinds = {
        each.name: np.concatenate(
            [_padded(getattr(w.kinds, each.name), most, each.name != "count") for w in works]
        )
        for each in fields(AttentionWork)
    }
    columns = {
        each.name: np.concatenate([getattr(work, each.name) for work in works])
        for each in fields(ServingWork)
        if each.name != "kinds"
    }
    return ServingWork(**columns, kinds=AttentionWork(**kinds))


def take_work(work: ServingWork, rows: np.ndarray) -> ServingWork:
    """Rows by mask or indices."""
    kinds = {each.name: getattr(work.kinds, each.name)[rows] for each in fields(AttentionWork)}
    columns = {
        each.name: getattr(work, each.name)[rows]
        for each in fields(ServingWork)
        if each.name != "kinds"
    }
    return ServingWork(**columns, kinds=AttentionWork(**kinds))


def _part(product: Product) -> str:
    if product.is_expert:
        return "expert"
    if product.split == "none":
        return "whole"
    blocks = ("gate_proj", "up_proj", "down_proj")
    return "dense" if product.name.rpartition(".")[2] in blocks else "attention"


def _count(shape: ModelShape, kind: str) -> int:
    return sum(layer.count for layer in shape.layers if layer.attention.kind == kind)


def _kinds(shape: ModelShape) -> AttentionWork:
    counts: dict[AttentionShape, int] = {}
    for layer in shape.layers:
        counts[layer.attention] = counts.get(layer.attention, 0) + layer.count
    rows = [(float(count), *_attention(each)) for each, count in counts.items()]
    names = [each.name for each in fields(AttentionWork)]
    columns = np.asarray(rows).T[:, None, :]
    return AttentionWork(**dict(zip(names, columns, strict=True)))


def _attention(each: AttentionShape) -> tuple[float, ...]:
    """Columns of `AttentionWork` after the count."""
    decode_flops = each.flops_per_pair
    shards = max(each.num_kv_heads, 1)
    if each.kind == "latent":
        decode_flops = 2.0 * each.num_heads * (2 * each.kv_rank + each.rope_dim)
        shards = 1
    window = float(each.window or np.inf)
    index = float(each.index_dim if each.index_heads and each.cached_per_token else 0)
    return (
        each.cached_per_token - index,
        float(shards),
        window,
        min(window, float(each.chosen_tokens or np.inf)),
        index,
        each.index_flops_per_pair,
        each.flops_per_pair,
        decode_flops,
        float(each.state_elements),
        each.state_flops_per_token,
    )


def _padded(column: np.ndarray, width: int, value: float) -> np.ndarray:
    missing = width - column.shape[-1]
    return np.pad(column, ((0, 0), (0, missing)), constant_values=value) if missing else column


def _wide(column: Column | float) -> np.ndarray:
    """[N] as [N, 1], beside kinds of attention."""
    return np.asarray(column, dtype=float)[..., None]
