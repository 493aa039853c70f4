"""The layers of a decoder, as its config records them; names are Hugging Face's own.

Legend: S packed rows (tokens; of this rank, where ranks share a row; under sequence parallelism a
part of those, outside attention), D model, H query heads, K key/value heads, T cached rows, C
channels per head, F feed-forward, L layers, P channels of a per-layer embedding.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.models.cache import KvCache
from phalanx.models.spec import AttentionKind, DecoderConfig
from phalanx.ops.attention import Documents, causal_attention, packed_attention
from phalanx.ops.dropout import DropoutKey
from phalanx.ops.gate import gated_product
from phalanx.ops.norm import rms_norm, rms_norm_rotate
from phalanx.ops.rope import rope_table, rotate_rows

Rope = tuple[Tensor, Tensor]
KeysValues = list[tuple[Tensor, Tensor]]  # of the packed row, or with caches of each document


class Attend(Protocol):
    """Attention of the rows that a rank holds of a packed row, wherever their keys are."""

    def __call__(
        self, q_SHC: Tensor, k_SKC: Tensor, v_SKC: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Output for each query, [S, H, C]; `scale` and `window` as `ops.attention` has them."""
        ...


class RowContext:
    """What every layer needs to know about the rows of one call.

    Deliberately neither dataclass nor pytree: FSDP2 casts the float tensors that it finds in layer
    arguments to its parameter dtype, which would round the rotation tables.

    Attributes:
        documents: where documents begin and end.
        rope: layer kind -> (cos, sin), float32.
        caches: one per document, or None.
        dropout: what adapters' dropout depends on, or None.
        per_layer_SLP: what each layer adds of the per-layer embedding, or None.
        attend: attention where ranks share a row (context parallelism); None: a rank has all of it.
        shared: layer -> its keys and values, where a later layer uses them too.
    """

    def __init__(
        self,
        documents: Documents,
        rope: dict[str, Rope],
        caches: tuple[KvCache, ...] | None,
        dropout: DropoutKey | None,
        per_layer_SLP: Tensor | None = None,
        attend: Attend | None = None,
    ) -> None:
        self.documents, self.rope, self.caches, self.dropout = documents, rope, caches, dropout
        self.per_layer_SLP, self.attend = per_layer_SLP, attend
        self.shared: dict[int, KeysValues] = {}


def kind_rope(kind: AttentionKind, positions_S: Tensor) -> Rope:
    """cos and sin of a layer kind, float32 [S, 1, C / 2] each."""
    return rope_table(
        positions_S,
        kind.head_dim,
        kind.rope_theta,
        kind.rope_factor,
        bands=kind.rope_bands,
        rotated_frac=kind.rope_rotated_frac,
    )


class GatedActivation(nn.Module):
    """activation(gate) * up, one of `architecture.ACTIVATIONS`."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Same shape as both."""
        return gated_product(gate, up, self.activation)


class RmsNorm(nn.Module):
    """Norm whose scale is offset + weight; without weights it does not scale."""

    def __init__(
        self,
        num_channels: int,
        eps: float,
        offset: float = 1.0,
        *,
        has_weight: bool = True,
        **factory,
    ) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight: nn.Parameter | None
        weight = nn.Parameter(torch.zeros(num_channels, **factory)) if has_weight else None
        self.register_parameter("weight", weight)

    def forward(self, x_SD: Tensor, rope: Rope | None = None) -> Tensor:
        """Same shape as `x_SD`; with (cos, sin), rows are rotated after the norm."""
        if rope is None:
            return rms_norm(x_SD, self.weight, self.eps, self.offset)
        return rms_norm_rotate(x_SD, self.weight, self.eps, *rope, self.offset)


class Projection(nn.Linear):
    """A matrix without bias that an adapter may extend (`models.lora`).

    `dropout` goes by keyword: torch's tensor-parallel hooks keep only the first positional input.
    """

    def __init__(self, num_in: int, num_out: int, **factory) -> None:
        super().__init__(num_in, num_out, bias=False, **factory)

    def forward(self, x_SD: Tensor, dropout: DropoutKey | None = None) -> Tensor:
        """x W^T; `dropout` matters to adapters only."""
        return F.linear(x_SD, self.weight)


def _norm(config: DecoderConfig, num_channels: int, **factory) -> RmsNorm:
    return RmsNorm(num_channels, config.norm_eps, config.norm_offset, **factory)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    A layer may lack `k_proj` (it uses another layer's keys and values), `v_proj` (its values are
    its keys before norm and rotation), or the norms per head.
    """

    def __init__(self, config: DecoderConfig, layer: int, **factory) -> None:
        super().__init__()
        self.layer, self.kind = layer, config.attention(layer)
        self.scale = config.query_scale
        self.source = config.kv_source(layer)
        self.is_shared = config.kv_sources.count(layer) > 1
        kind, d = self.kind, config.hidden_size
        q, kv = kind.num_heads * kind.head_dim, kind.num_kv_heads * kind.head_dim
        self.q_proj = Projection(d, q, **factory)
        self.q_norm = _norm(config, kind.head_dim, **factory) if config.qk_norm else None
        self.k_norm = self.v_proj = self.v_norm = None
        if self.source == layer:
            self.k_proj = Projection(d, kv, **factory)
            if not kind.key_is_value:
                self.v_proj = Projection(d, kv, **factory)
            if config.qk_norm:
                self.k_norm = _norm(config, kind.head_dim, **factory)
            if config.value_norm:
                self.v_norm = _norm(config, kind.head_dim, has_weight=False)
        self.o_proj = Projection(q, d, **factory)

    def forward(self, x_SD: Tensor, context: RowContext) -> Tensor:
        """Output of the attention block, [S, D]."""
        rope, documents = context.rope[self.kind.name], context.documents
        q_SHC = _turned(self._heads(self.q_proj, x_SD, context), self.q_norm, rope)
        keys_values = self._keys_values(x_SD, rope, context)
        scale, window = self.scale, self.kind.window
        if context.attend is not None:
            out_SHC = context.attend(q_SHC, *keys_values[0], scale=scale, window=window)
        elif context.caches is None:
            k_SKC, v_SKC = keys_values[0]
            out_SHC = packed_attention(q_SHC, k_SKC, v_SKC, documents, scale=scale, window=window)
        else:
            queries = q_SHC.split(documents.lengths)
            parts = [
                causal_attention(q, k_TKC, v_TKC, scale=scale, window=window)
                for q, (k_TKC, v_TKC) in zip(queries, keys_values)
            ]
            out_SHC = torch.cat(parts)
        return self.o_proj(out_SHC.flatten(-2), dropout=context.dropout)

    def _heads(self, projection: Projection, x_SD: Tensor, context: RowContext) -> Tensor:
        # heads are counted from the projection, which holds a part of them in tensor parallelism
        return projection(x_SD, dropout=context.dropout).unflatten(-1, (-1, self.kind.head_dim))

    def _keys_values(self, x_SD: Tensor, rope: Rope, context: RowContext) -> KeysValues:
        if self.source != self.layer:
            return context.shared[self.source]
        k_SKC = self._heads(self.k_proj, x_SD, context)
        v_SKC = k_SKC if self.v_proj is None else self._heads(self.v_proj, x_SD, context)
        v_SKC = v_SKC if self.v_norm is None else self.v_norm(v_SKC)
        k_SKC = _turned(k_SKC, self.k_norm, rope)
        if context.caches is None:
            keys_values = [(k_SKC, v_SKC)]
        else:
            rows = zip(
                context.caches, *(x.split(context.documents.lengths) for x in (k_SKC, v_SKC))
            )
            keys_values = [cache.append(self.layer, k, v) for cache, k, v in rows]
        if self.is_shared:
            context.shared[self.layer] = keys_values
        return keys_values


def _turned(x_SHC: Tensor, norm: RmsNorm | None, rope: Rope) -> Tensor:
    return rotate_rows(x_SHC, *rope) if norm is None else norm(x_SHC, rope)


class FeedForward(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig, layer: int, **factory) -> None:
        super().__init__()
        d, f = config.hidden_size, config.ffn_width(layer)
        self.gate_proj = Projection(d, f, **factory)
        self.up_proj = Projection(d, f, **factory)
        self.act_fn = GatedActivation(config.activation)
        self.down_proj = Projection(f, d, **factory)

    def forward(self, x_SD: Tensor, context: RowContext) -> Tensor:
        """[S, D]."""
        gate_SF = self.gate_proj(x_SD, dropout=context.dropout)
        up_SF = self.up_proj(x_SD, dropout=context.dropout)
        return self.down_proj(self.act_fn(gate_SF, up_SF), dropout=context.dropout)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each with a norm before it and, in some families, after it."""

    def __init__(self, config: DecoderConfig, layer: int, **factory) -> None:
        super().__init__()
        d = config.hidden_size
        self.layer, self.is_sandwich = layer, config.sandwich_norms
        self.self_attn = Attention(config, layer, **factory)
        self.mlp = FeedForward(config, layer, **factory)
        self.input_layernorm = _norm(config, d, **factory)
        # behind attention where blocks have norms after them, else before the feed-forward
        self.post_attention_layernorm = _norm(config, d, **factory)
        if self.is_sandwich:
            self.pre_feedforward_layernorm = _norm(config, d, **factory)
            self.post_feedforward_layernorm = _norm(config, d, **factory)
        self.has_per_layer = config.per_layer_embedding is not None
        if config.per_layer_embedding is not None:
            width = config.per_layer_embedding.width
            self.per_layer_input_gate = Projection(d, width, **factory)
            self.act_fn = GatedActivation(config.activation)
            self.per_layer_projection = Projection(width, d, **factory)
            self.post_per_layer_input_norm = _norm(config, d, **factory)
        self.layer_scalar = None
        if config.layer_scalar:  # a buffer in Hugging Face: stored, never trained
            self.layer_scalar = nn.Parameter(torch.ones(1, **factory), requires_grad=False)

    def forward(self, x_SD: Tensor, context: RowContext) -> Tensor:
        """[S, D]."""
        attended_SD = self.self_attn(self.input_layernorm(x_SD), context)
        if self.is_sandwich:
            x_SD = x_SD + self.post_attention_layernorm(attended_SD)
            fed_SD = self.mlp(self.pre_feedforward_layernorm(x_SD), context)
            x_SD = x_SD + self.post_feedforward_layernorm(fed_SD)
        else:
            x_SD = x_SD + attended_SD
            x_SD = x_SD + self.mlp(self.post_attention_layernorm(x_SD), context)
        if self.has_per_layer:
            x_SD = x_SD + self._of_this_layer(x_SD, context)
        return x_SD if self.layer_scalar is None else x_SD * self.layer_scalar

    def _of_this_layer(self, x_SD: Tensor, context: RowContext) -> Tensor:
        """What the per-layer embedding adds, [S, D]."""
        assert context.per_layer_SLP is not None
        gate_SP = self.per_layer_input_gate(x_SD, dropout=context.dropout)
        gated_SP = self.act_fn(gate_SP, context.per_layer_SLP[:, self.layer])
        out_SD = self.per_layer_projection(gated_SP, dropout=context.dropout)
        return self.post_per_layer_input_norm(out_SD)
