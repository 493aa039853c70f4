"""A decoder layer as the matrix products and attentions that cost time and memory. No torch.

Symbols: D hidden size, H query heads, K key and value heads, C channels of a head, F feed-forward
width, E experts, A experts that a token uses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.models.spec import is_target

SPLITS = ("column", "row", "none")

# "all", "attention", "" for none; or names and patterns of modules
Adapters = str | tuple[str, ...]


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
            (a state of fixed size: gated delta rule, Mamba 2) or "none".
        num_heads, num_kv_heads, head_dim: H, K, C of queries and keys. Of a linear attention H
            counts the states, each C times `value_dim`, and K the heads of queries and keys (of
            Mamba 2: heads, groups, state size).
        value_dim: channels of a value head; 0: `head_dim`.
        window: tokens that a query sees; 0: all before it.
        query_rank: channels that queries pass through (0: projected at once).
        kv_rank, rope_dim: of latent attention: widths of the cached latent and of the channels
            that rotate, shared by heads.
        chosen_tokens: keys that a query attends to where an index picks them; 0: all it sees.
        index_heads, index_dim: of that index, which scores every key seen (DeepSeek V3.2).
        key_is_value: there is no value projection.
        reuses_keys: keys and values are another layer's: neither projected nor cached.
        is_gated: the output is multiplied by a projected gate of its own size.
        head_scalars: numbers that a token sets per state of a linear attention (decay, beta).
        output_groups, output_rank: of an output in two steps: each group of heads to `output_rank`
            channels, all of these to D (DeepSeek V4); 0: one step.
        compression: the cache keeps this fraction of its elements: entries shared by tokens, or
            one vector as key and value.
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
    index_heads: int = 0
    index_dim: int = 0
    key_is_value: bool = False
    reuses_keys: bool = False
    is_gated: bool = False
    head_scalars: int = 0
    output_groups: int = 0
    output_rank: int = 0
    compression: int = 1

    @property
    def value_width(self) -> int:
        """Channels of all value heads together, as the output projection reads them."""
        return self.num_heads * (self.value_dim or self.head_dim)

    def products(self, hidden: int) -> Iterator[Product]:
        """Its projections."""
        if self.kind == "none":
            return
        yield from self._index(hidden)
        if self.kind == "latent":
            yield from self._latent(hidden)
            return
        is_linear = self.kind == "linear"
        queries = (self.num_kv_heads if is_linear else self.num_heads) * self.head_dim
        gate = self.value_width if self.is_gated else 0
        yield from self._queries(hidden, queries if is_linear else queries + gate)
        if not self.reuses_keys:
            yield Product("k_proj", hidden, self.num_kv_heads * self.head_dim, "column")
        if not (self.reuses_keys or self.key_is_value):
            yield Product("v_proj", hidden, self._value_outputs, "column")
        if is_linear and gate:
            yield Product("z_proj", hidden, gate, "column")
        if is_linear and self.head_scalars:
            yield Product("ba_proj", hidden, self.num_heads * self.head_scalars, "column")
        yield from self._output(hidden)

    @property
    def _value_outputs(self) -> int:
        heads = self.num_heads if self.kind == "linear" else self.num_kv_heads
        return heads * (self.value_dim or self.head_dim)

    def _index(self, hidden: int) -> Iterator[Product]:
        if self.index_heads:
            outputs = self.index_heads * self.index_dim
            yield Product("indexer.wq_b", self.query_rank or hidden, outputs, "none")
            yield Product("indexer.wk", hidden, self.index_dim, "none")
            yield Product("indexer.weights_proj", hidden, self.index_heads, "none")

    def _latent(self, hidden: int) -> Iterator[Product]:
        yield from self._queries(hidden, self.num_heads * self.head_dim)
        yield Product("kv_a_proj_with_mqa", hidden, self.kv_rank + self.rope_dim, "none")
        plain = self.head_dim - self.rope_dim
        both = self.num_heads * (plain + (self.value_dim or self.head_dim))
        yield Product("kv_b_proj", self.kv_rank, both, "column")
        yield from self._output(hidden)

    def _queries(self, hidden: int, outputs: int) -> Iterator[Product]:
        if self.query_rank:
            yield Product("q_a_proj", hidden, self.query_rank, "none")
            yield Product("q_b_proj", self.query_rank, outputs, "column")
        else:
            yield Product("q_proj", hidden, outputs, "column")

    def _output(self, hidden: int) -> Iterator[Product]:
        if self.output_groups:
            between = self.output_groups * self.output_rank
            yield Product("o_a_proj", self.value_width // self.output_groups, between, "column")
            yield Product("o_b_proj", between, hidden, "row")
        else:
            yield Product("o_proj", self.value_width, hidden, "row")

    @property
    def flops_per_pair(self) -> float:
        """Forward FLOPs of one query token and one key token: q k^T and the weighted values."""
        if self.kind in ("none", "linear"):
            return 0.0
        return 2.0 * (self.num_heads * self.head_dim + self.value_width)

    @property
    def index_flops_per_pair(self) -> float:
        """Forward FLOPs of the index for one query token and one key token seen."""
        return 2.0 * self.index_heads * self.index_dim

    @property
    def state_flops_per_token(self) -> float:
        """Forward FLOPs of a linear attention's state update and read (two products with it)."""
        if self.kind != "linear":
            return 0.0
        return 6.0 * self.num_heads * self.head_dim * (self.value_dim or self.head_dim)

    @property
    def cached_per_token(self) -> int:
        """Elements that a decoder keeps of each token it may look back at (576 of DeepSeek-V3),
        keys of an index included."""
        if self.kind in ("none", "linear") or self.reuses_keys:
            return 0
        kept = self.index_dim if self.index_heads else 0
        if self.kind == "latent":
            kept += self.kv_rank + self.rope_dim
        else:
            kept += self.num_kv_heads * (self.head_dim + (self.value_dim or self.head_dim))
        return kept // self.compression

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
        expert_hidden: channels that experts read and write, where tokens are projected down before
            they are sent and up after (Nemotron 3's latent mixture); 0: D.
        side_width: channels of a second embedding that each layer projects, gates and adds (Gemma
            4's E models).
    """

    width: int = 0
    is_gated: bool = True
    num_experts: int = 0
    num_active: int = 0
    expert_width: int = 0
    shared_width: int = 0
    expert_hidden: int = 0
    side_width: int = 0

    def products(self, hidden: int) -> Iterator[Product]:
        """Its matrices."""
        yield from self._block("", hidden, self.width)
        if self.num_experts:
            yield Product("gate", hidden, self.num_experts, "none")
            yield from self._block("shared_experts.", hidden, self.shared_width)
            many = {"copies": self.num_experts, "active": float(self.num_active)}
            if self.expert_hidden:
                yield Product("fc1_latent_proj", hidden, self.expert_hidden, "none")
                yield Product("fc2_latent_proj", self.expert_hidden, hidden, "none")
            inner = self.expert_hidden or hidden
            yield from self._block("experts.", inner, self.expert_width, **many)
        if self.side_width:
            yield Product("per_layer_model_projection", hidden, self.side_width, "none")
            yield Product("per_layer_input_gate", hidden, self.side_width, "none")
            yield Product("per_layer_projection", self.side_width, hidden, "none")

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
        other_params: weights that multiply no vector: biases, norms of heads, convolutions.
    """

    count: int
    attention: AttentionShape
    feed_forward: FeedForwardShape
    norms: int = 2
    other_params: int = 0

    def products(self, hidden: int) -> tuple[Product, ...]:
        """Matrices of one such layer."""
        return (*self.attention.products(hidden), *self.feed_forward.products(hidden))

    def adapted(self, hidden: int, adapters: Adapters) -> tuple[Product, ...]:
        """Its matrices that have a LoRA adapter.

        Args:
            adapters: patterns match as `train.lora_targets` does, but for the number of a layer:
                layers that are alike are told apart by none.
        """
        attended = tuple(self.attention.products(hidden))
        if not isinstance(adapters, tuple):
            both = {"all": self.products(hidden), "attention": attended}
            return both.get(adapters, ())
        plain = [re.sub(r"layers\.[^.]+\.", "layers.0.", each) for each in adapters]
        modules = _LINEAR if self.attention.kind == "linear" else {}
        named = [(modules.get(each.name, ("self_attn." + each.name,)), each) for each in attended]
        named += [(("mlp." + each.name,), each) for each in self.feed_forward.products(hidden)]
        return tuple(product for names, product in named if _is_among(names, plain))

    def num_params(self, hidden: int) -> int:
        """Of one such layer."""
        matrices = sum(product.num_params for product in self.products(hidden))
        return matrices + self.norms * hidden + self.other_params


# Of linear attentions, as Hugging Face's gated delta rule (joined or apart) and Mamba 2 name them.
_JOINED = ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_qkv", "mixer.in_proj")
_LINEAR = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), _JOINED),
    "z_proj": ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_z", "mixer.in_proj"),
    "ba_proj": ("linear_attn.in_proj_ba", "linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    "o_proj": ("linear_attn.out_proj", "mixer.out_proj"),
}


def _is_among(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(is_target(f"model.layers.0.{name}", each) for name in names for each in patterns)
