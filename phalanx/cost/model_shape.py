"""A model as the matrix products and attentions that cost time and memory. No torch, no tensors.

`models.architecture` says what a decoder computes and is strict about it; a price needs less, and
of more families: latent attention, mixtures of experts, linear attention. All that is counted
(parameters, FLOPs, bytes, traffic) comes from `LayerShape.products`.

Symbols: D hidden size, H query heads, K key and value heads, C channels of a head, F feed-forward
width, E experts, A experts that a token uses, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from phalanx.models.architecture import DecoderConfig

SPLITS = ("column", "row", "none")


class Product(NamedTuple):
    """A matrix of weights that tokens are multiplied with.

    Attributes:
        name: as Hugging Face names the module ("q_proj", "experts.gate_proj").
        inputs, outputs: its sizes; 2 inputs outputs FLOPs a token forward.
        split: how tensor parallelism cuts it: outputs ("column"), inputs ("row") or not ("none").
        copies: such matrices in the layer (E for experts).
        active: of them that one token is multiplied with (A for experts).
    """

    name: str
    inputs: int
    outputs: int
    split: str
    copies: int = 1
    active: float = 1.0

    @property
    def is_expert(self) -> bool:
        """Whether expert parallelism spreads its copies."""
        return self.copies > 1

    @property
    def num_params(self) -> int:
        """Of all copies."""
        return self.inputs * self.outputs * self.copies

    @property
    def flops_per_token(self) -> float:
        """Forward."""
        return 2.0 * self.inputs * self.outputs * self.active


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """What mixes tokens in a layer.

    Attributes:
        kind: "softmax" (multi-head, grouped or multi-query), "latent" (DeepSeek's MLA), "linear"
            (a state of fixed size: gated delta rule, state spaces) or "none".
        num_heads, num_kv_heads, head_dim: H, K, C of queries and keys.
        value_dim: channels of a value head; 0: `head_dim`.
        window: tokens that a query sees; 0: all before it.
        query_rank, kv_rank, rope_dim: of latent attention: widths of the compressed queries (0:
            not compressed) and of the cached latent, and channels that rotate, shared by heads.
        chosen_tokens: keys that a query attends to where an index picks them; 0: all it sees.
        key_is_value: there is no value projection.
        is_gated: the output is multiplied by a projected gate of its own size.
    """

    kind: str = "softmax"
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int = 0
    window: int = 0
    query_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    chosen_tokens: int = 0
    key_is_value: bool = False
    is_gated: bool = False

    @property
    def value_width(self) -> int:
        """Channels of all value heads together, as the output projection reads them."""
        return self.num_heads * (self.value_dim or self.head_dim)

    def products(self, hidden: int) -> Iterator[Product]:
        """Its projections."""
        queries = self.num_heads * self.head_dim
        if self.kind == "none":
            return
        if self.kind == "latent":
            yield from self._latent(hidden)
            return
        values = self.num_kv_heads * (self.value_dim or self.head_dim)
        yield Product("q_proj", hidden, queries * (2 if self.is_gated else 1), "column")
        yield Product("k_proj", hidden, self.num_kv_heads * self.head_dim, "column")
        if not self.key_is_value:
            yield Product("v_proj", hidden, values, "column")
        yield Product("o_proj", self.value_width, hidden, "row")

    def _latent(self, hidden: int) -> Iterator[Product]:
        queries = self.num_heads * self.head_dim  # rotating channels included
        if self.query_rank:
            yield Product("q_a_proj", hidden, self.query_rank, "none")
            yield Product("q_b_proj", self.query_rank, queries, "column")
        else:
            yield Product("q_proj", hidden, queries, "column")
        yield Product("kv_a_proj_with_mqa", hidden, self.kv_rank + self.rope_dim, "none")
        plain = self.head_dim - self.rope_dim
        both = self.num_heads * (plain + (self.value_dim or self.head_dim))
        yield Product("kv_b_proj", self.kv_rank, both, "column")
        yield Product("o_proj", self.value_width, hidden, "row")

    @property
    def flops_per_pair(self) -> float:
        """Forward FLOPs of one query token and one key token: q k^T and the weighted values."""
        if self.kind in ("none", "linear"):
            return 0.0
        return 2.0 * (self.num_heads * self.head_dim + self.value_width)

    @property
    def state_flops_per_token(self) -> float:
        """Forward FLOPs of a linear attention's state update and read (two products with it)."""
        if self.kind != "linear":
            return 0.0
        return 6.0 * self.num_heads * self.head_dim * (self.value_dim or self.head_dim)

    @property
    def cached_per_token(self) -> int:
        """Elements that a decoder keeps of each token it may look back at."""
        if self.kind in ("none", "linear"):
            return 0
        if self.kind == "latent":
            return self.kv_rank + self.rope_dim
        return self.num_kv_heads * (self.head_dim + (self.value_dim or self.head_dim))

    @property
    def state_elements(self) -> int:
        """Elements of a linear attention's state, per sequence."""
        if self.kind != "linear":
            return 0
        return self.num_heads * self.head_dim * (self.value_dim or self.head_dim)


@dataclass(frozen=True, kw_only=True)
class FeedForwardShape:
    """What transforms each token.

    Attributes:
        width: F of a dense block (0: none), beside or instead of experts.
        is_gated: three matrices (gate, up, down), not two.
        num_experts, num_active, expert_width: a mixture of experts.
        shared_width: of experts that every token uses, together.
    """

    width: int = 0
    is_gated: bool = True
    num_experts: int = 0
    num_active: int = 0
    expert_width: int = 0
    shared_width: int = 0

    def products(self, hidden: int) -> Iterator[Product]:
        """Its matrices."""
        yield from self._block("", hidden, self.width)
        if self.num_experts:
            yield Product("gate", hidden, self.num_experts, "none")
            yield from self._block("shared_experts.", hidden, self.shared_width)
            many = {"copies": self.num_experts, "active": float(self.num_active)}
            yield from self._block("experts.", hidden, self.expert_width, **many)

    def _block(self, prefix: str, hidden: int, width: int, **many: float) -> Iterator[Product]:
        if not width:
            return
        for name in ("gate_proj", "up_proj") if self.is_gated else ("up_proj",):
            yield Product(prefix + name, hidden, width, "column", **many)  # type: ignore[arg-type]
        yield Product(prefix + "down_proj", width, hidden, "row", **many)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Layers that are alike.

    Attributes:
        count: how many there are.
        norms: vectors of D weights.
    """

    count: int
    attention: AttentionShape
    feed_forward: FeedForwardShape
    norms: int = 2

    def products(self, hidden: int) -> tuple[Product, ...]:
        """Matrices of one such layer."""
        return (*self.attention.products(hidden), *self.feed_forward.products(hidden))


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder as its layers.

    Attributes:
        hidden, vocab: D, V.
        tied_head: the head is the embedding.
        learned_positions: rows of a table of positions.
        source: where the sizes come from.
    """

    name: str
    hidden: int
    vocab: int
    layers: tuple[LayerShape, ...]
    tied_head: bool = False
    learned_positions: int = 0
    source: str = ""

    @property
    def num_layers(self) -> int:
        """L."""
        return sum(layer.count for layer in self.layers)

    @cached_property
    def layer_params(self) -> int:
        """Of all layers."""
        return sum(
            layer.count
            * (sum(p.num_params for p in layer.products(self.hidden)) + layer.norms * self.hidden)
            for layer in self.layers
        )

    @cached_property
    def expert_params(self) -> int:
        """Of all experts of all layers."""
        return sum(
            layer.count * p.num_params
            for layer in self.layers
            for p in layer.products(self.hidden)
            if p.is_expert
        )

    @property
    def embedding_params(self) -> int:
        """Of the embedding, the head where it is not the same, positions and the last norm."""
        tables = self.vocab * (1 if self.tied_head else 2) + self.learned_positions
        return tables * self.hidden + self.hidden

    @property
    def num_params(self) -> int:
        """All."""
        return self.layer_params + self.embedding_params

    @cached_property
    def product_flops_per_token(self) -> float:
        """Forward FLOPs of a token in products with the weights of layers, without the head."""
        return sum(
            layer.count * p.flops_per_token
            for layer in self.layers
            for p in layer.products(self.hidden)
        )

    @property
    def head_flops_per_token(self) -> float:
        """Forward FLOPs of the head at one token."""
        return 2.0 * self.hidden * self.vocab

    def attention_flops(self, tokens: float, mean_seen: float) -> float:
        """Forward FLOPs of `tokens` queries that see `mean_seen` keys each, on average."""
        total = 0.0
        for layer in self.layers:
            each = layer.attention
            limits = [n for n in (each.window, each.chosen_tokens) if n]
            seen = min([mean_seen, *limits])
            per_token = each.flops_per_pair * seen + each.state_flops_per_token
            total += layer.count * tokens * per_token
        return total

    def cached_per_token(self) -> int:
        """Elements of a token in the KV caches of layers without a window."""
        return sum(
            layer.count * layer.attention.cached_per_token
            for layer in self.layers
            if not layer.attention.window
        )


def shape_of(config: DecoderConfig, name: str = "") -> ModelShape:
    """The shape of a decoder that Phalanx computes; equal layers together, in order."""
    layers: dict[tuple, LayerShape] = {}
    for at in range(config.num_layers):
        kind, width = config.attention(at), config.ffn_width(at)
        key = (kind.name, width)
        count = layers[key].count + 1 if key in layers else 1
        experts = config.experts
        layers[key] = LayerShape(
            count=count,
            attention=AttentionShape(
                num_heads=kind.num_heads,
                num_kv_heads=kind.num_kv_heads,
                head_dim=kind.head_dim,
                window=kind.window or 0,
                key_is_value=kind.key_is_value,
            ),
            feed_forward=FeedForwardShape(
                width=width,
                num_experts=experts.num_experts if experts else 0,
                num_active=experts.num_active if experts else 0,
                expert_width=experts.width if experts else 0,
            ),
            norms=4 if config.sandwich_norms else 2,
        )
    return ModelShape(
        name=name or config.family,
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        layers=tuple(layers.values()),
        tied_head=config.tied_head,
    )
