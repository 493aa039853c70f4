"""A model as the matrix products and attentions that cost time and memory. No torch, no tensors.

`models.architecture` says what a decoder computes and is strict about it; a price needs less, and
of more families: latent attention, mixtures of experts, linear attention. All that is counted
(parameters, FLOPs, bytes, traffic) comes from `LayerShape.products`.

Symbols: D hidden size, H query heads, K key and value heads, C channels of a head, F feed-forward
width, E experts, A experts that a token uses, V vocabulary, L layers.

What is left out: towers for pictures and sound, layers that predict further tokens, and products of
two activations other than attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from phalanx.cost.layer_shape import (
    SPLITS,
    AttentionShape,
    FeedForwardShape,
    LayerShape,
    Product,
)
from phalanx.models.architecture import DecoderConfig

__all__ = [
    "SPLITS",
    "AttentionShape",
    "FeedForwardShape",
    "LayerShape",
    "ModelShape",
    "Product",
    "shape_of",
]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder as its layers.

    Attributes:
        hidden, vocab: D, V.
        tied_head: the head is the embedding.
        learned_positions: rows of a table of positions.
        other_params: of further tables that are looked up, as Gemma 4's embedding per layer.
        source: where the sizes come from.
    """

    name: str
    hidden: int
    vocab: int
    layers: tuple[LayerShape, ...]
    tied_head: bool = False
    learned_positions: int = 0
    other_params: int = 0
    source: str = ""

    @property
    def num_layers(self) -> int:
        """L."""
        return sum(layer.count for layer in self.layers)

    @cached_property
    def layer_params(self) -> int:
        """Of all layers."""
        return sum(layer.count * layer.num_params(self.hidden) for layer in self.layers)

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
        """Of the embedding, the head where it is not the same, other tables, the last norm."""
        tables = self.vocab * (1 if self.tied_head else 2) + self.learned_positions
        return tables * self.hidden + self.hidden + self.other_params

    @property
    def num_params(self) -> int:
        """All."""
        return self.layer_params + self.embedding_params

    @cached_property
    def active_params(self) -> int:
        """That one token uses: all but idle experts and the tables in which it is looked up."""
        idle = sum(
            layer.count * p.inputs * p.outputs * (p.copies - p.active)
            for layer in self.layers
            for p in layer.products(self.hidden)
        )
        return self.layer_params - round(idle) + (self.vocab + 1) * self.hidden

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

    def attention_flops(
        self, tokens: float, mean_seen: float, longest_seen: float | None = None
    ) -> float:
        """Forward FLOPs of `tokens` queries.

        Args:
            mean_seen: keys that they see, on average, before a window or an index limits them.
            longest_seen: keys that the last of a row sees, the others evenly fewer (a document of
                n tokens: n, with n / 2 as the mean); None: every query sees the mean.
        """
        total = 0.0
        for layer in self.layers:
            each = layer.attention
            in_window = _mean_limited(mean_seen, longest_seen, each.window)
            chosen = _mean_limited(mean_seen, longest_seen, each.chosen_tokens)
            per_token = each.flops_per_pair * min(in_window, chosen)
            per_token += each.index_flops_per_pair * in_window + each.state_flops_per_token
            total += layer.count * tokens * per_token
        return total

    def cached_per_token(self) -> int:
        """Elements of a token in the KV caches of layers without a window."""
        return sum(
            layer.count * layer.attention.cached_per_token
            for layer in self.layers
            if not layer.attention.window
        )


def _mean_limited(mean: float, longest: float | None, limit: int) -> float:
    """The mean of min(x, limit) for x spread evenly between 2 mean - longest and longest."""
    high = mean if longest is None else longest
    low = 2 * mean - high
    if not limit or limit >= high:
        return mean
    if limit <= low:
        return float(limit)
    below, above = limit - low, high - limit
    return ((low + limit) / 2 * below + limit * above) / (high - low)


def shape_of(config: DecoderConfig, name: str = "") -> ModelShape:
    """The shape of a decoder that Phalanx computes; equal layers together, in order."""
    layers: dict[LayerShape, int] = {}
    for at in range(config.num_layers):
        layer = _decoder_layer(config, at)
        layers[layer] = layers.get(layer, 0) + 1
    ple = config.per_layer_embedding
    return ModelShape(
        name=name or config.family,
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        layers=tuple(replace(layer, count=count) for layer, count in layers.items()),
        tied_head=config.tied_head,
        other_params=ple.vocab_size * config.num_layers * ple.width + ple.width if ple else 0,
    )


def _decoder_layer(config: DecoderConfig, at: int) -> LayerShape:
    kind, experts, ple = config.attention(at), config.experts, config.per_layer_embedding
    reuses_keys = config.kv_source(at) != at
    head_norms = (1 if reuses_keys else 2) * kind.head_dim if config.qk_norm else 0
    # a mixture has three norms more and scales its router per channel and per expert
    of_router = config.hidden_size + experts.num_experts if experts else 0
    return LayerShape(
        count=1,
        attention=AttentionShape(
            num_heads=kind.num_heads,
            num_kv_heads=kind.num_kv_heads,
            head_dim=kind.head_dim,
            window=kind.window or 0,
            key_is_value=kind.key_is_value,
            reuses_keys=reuses_keys,
        ),
        feed_forward=FeedForwardShape(
            width=config.ffn_width(at),
            num_experts=experts.num_experts if experts else 0,
            num_active=experts.num_active if experts else 0,
            expert_width=experts.width if experts else 0,
            side_width=ple.width if ple else 0,
        ),
        norms=(4 if config.sandwich_norms else 2) + (3 if experts else 0) + (1 if ple else 0),
        other_params=head_norms + of_router + (1 if config.layer_scalar else 0),
    )
