"""The decoder of the Gemma 3 text family; its state dict is the set of canonical tensors.

Legend: S packed rows (tokens), D model, H query heads, K key/value heads, C channels per head,
F feed-forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.models.cache import KvCache
from phalanx.models.spec import DTYPE_BYTES, DecoderConfig
from phalanx.ops.attention import Documents, causal_attention, packed_attention
from phalanx.ops.dropout import DropoutKey
from phalanx.ops.norm import rms_norm, rms_norm_rotate
from phalanx.ops.rope import rope_table


class RowContext:
    """What every layer needs to know about the rows of one call.

    Deliberately neither dataclass nor pytree: FSDP2 casts the float tensors that it finds in layer
    arguments to its parameter dtype, which would round the rotation tables.

    Attributes:
        documents: where documents begin and end.
        rope: layer kind -> (cos, sin), float32.
        caches: one per document, or None.
        dropout: what adapters' dropout depends on, or None.
    """

    def __init__(
        self,
        documents: Documents,
        rope: dict[str, tuple[Tensor, Tensor]],
        caches: tuple[KvCache, ...] | None,
        dropout: DropoutKey | None,
    ) -> None:
        self.documents, self.rope, self.caches, self.dropout = documents, rope, caches, dropout


class RmsNorm(nn.Module):
    """Norm with weights around zero."""

    def __init__(self, num_channels: int, eps: float, **factory) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(num_channels, **factory))

    def forward(self, x_SD: Tensor, rope: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Same shape as `x_SD`; with (cos, sin), rows are rotated after the norm."""
        if rope is None:
            return rms_norm(x_SD, self.weight, self.eps)
        return rms_norm_rotate(x_SD, self.weight, self.eps, *rope)


class Projection(nn.Linear):
    """A matrix without bias that an adapter may extend (`models.lora`).

    `dropout` goes by keyword: torch's tensor-parallel hooks keep only the first positional input.
    """

    def __init__(self, num_in: int, num_out: int, **factory) -> None:
        super().__init__(num_in, num_out, bias=False, **factory)

    def forward(self, x_SD: Tensor, dropout: DropoutKey | None = None) -> Tensor:
        """x W^T; `dropout` matters to adapters only."""
        return F.linear(x_SD, self.weight)


class Attention(nn.Module):
    """Grouped-query attention with q/k norm and rotary positions."""

    def __init__(self, config: DecoderConfig, layer: int, **factory) -> None:
        super().__init__()
        self.layer, self.kind = layer, config.attention(layer)
        self.scale = config.query_scale
        kind, d = self.kind, config.hidden_size
        q, kv = kind.num_heads * kind.head_dim, kind.num_kv_heads * kind.head_dim
        self.q_proj = Projection(d, q, **factory)
        self.k_proj = Projection(d, kv, **factory)
        self.v_proj = Projection(d, kv, **factory)
        self.o_proj = Projection(q, d, **factory)
        self.q_norm = RmsNorm(kind.head_dim, config.norm_eps, **factory)
        self.k_norm = RmsNorm(kind.head_dim, config.norm_eps, **factory)

    def forward(self, x_SD: Tensor, context: RowContext) -> Tensor:
        """Output of the attention block, [S, D]."""
        rope, head_shape = context.rope[self.kind.name], (-1, self.kind.head_dim)
        # heads are counted from the projections, which hold a part of them under tensor parallelism
        q_SHC = self.q_proj(x_SD, dropout=context.dropout).unflatten(-1, head_shape)
        k_SKC = self.k_proj(x_SD, dropout=context.dropout).unflatten(-1, head_shape)
        v_SKC = self.v_proj(x_SD, dropout=context.dropout).unflatten(-1, head_shape)
        q_SHC = self.q_norm(q_SHC, rope)
        k_SKC = self.k_norm(k_SKC, rope)
        attend = self._attend if context.caches is None else self._attend_cached
        out_SHC = attend(q_SHC, k_SKC, v_SKC, context)
        return self.o_proj(out_SHC.flatten(-2), dropout=context.dropout)

    def _attend(self, q_SHC: Tensor, k_SKC: Tensor, v_SKC: Tensor, context: RowContext) -> Tensor:
        return packed_attention(
            q_SHC, k_SKC, v_SKC, context.documents, scale=self.scale, window=self.kind.window
        )

    def _attend_cached(
        self, q_SHC: Tensor, k_SKC: Tensor, v_SKC: Tensor, context: RowContext
    ) -> Tensor:
        rows = zip(
            context.caches, *(x.split(context.documents.lengths) for x in (q_SHC, k_SKC, v_SKC))
        )
        outputs = []
        for cache, q, k, v in rows:
            k_TKC, v_TKC = cache.append(self.layer, k, v)
            outputs.append(
                causal_attention(q, k_TKC, v_TKC, scale=self.scale, window=self.kind.window)
            )
        return torch.cat(outputs)


class FeedForward(nn.Module):
    """down(gelu_tanh(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig, **factory) -> None:
        super().__init__()
        d, f = config.hidden_size, config.intermediate_size
        self.gate_proj = Projection(d, f, **factory)
        self.up_proj = Projection(d, f, **factory)
        self.down_proj = Projection(f, d, **factory)

    def forward(self, x_SD: Tensor, context: RowContext) -> Tensor:
        """[S, D]."""
        gate_SF = F.gelu(self.gate_proj(x_SD, dropout=context.dropout), approximate="tanh")
        up_SF = self.up_proj(x_SD, dropout=context.dropout)
        return self.down_proj(gate_SF * up_SF, dropout=context.dropout)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each with a norm before and after it (sandwich norms)."""

    def __init__(self, config: DecoderConfig, layer: int, **factory) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.norm_eps
        self.self_attn = Attention(config, layer, **factory)
        self.mlp = FeedForward(config, **factory)
        self.input_layernorm = RmsNorm(d, eps, **factory)
        self.post_attention_layernorm = RmsNorm(d, eps, **factory)
        self.pre_feedforward_layernorm = RmsNorm(d, eps, **factory)
        self.post_feedforward_layernorm = RmsNorm(d, eps, **factory)

    def forward(self, x_SD: Tensor, context: RowContext) -> Tensor:
        """[S, D]."""
        attended = self.self_attn(self.input_layernorm(x_SD), context)
        x_SD = x_SD + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(x_SD), context)
        return x_SD + self.post_feedforward_layernorm(fed)


class DecoderBody(nn.Module):
    """Embedding, layers, last norm: everything below `model.` in canonical names."""

    def __init__(self, config: DecoderConfig, layers: range, ends: tuple[bool, bool], **factory):
        super().__init__()
        self.config = config
        first, last = ends
        if first or last:  # the tied head needs the embedding too
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, **factory)
        # a dict keyed by the global index: a pipeline stage keeps canonical names
        self.layers = nn.ModuleDict({str(at): DecoderLayer(config, at, **factory) for at in layers})
        if last:
            self.norm = RmsNorm(config.hidden_size, config.norm_eps, **factory)


class Decoder(nn.Module):
    """A decoder, or the stage of one that holds `layers`.

    Args:
        config: what to build; weights get `config.dtype`.
        device: "meta" builds shapes only (fill with `load_parameters`).
        layers: global indices of the layers to hold; None: all.

    Weights are undefined until `parameters.load_parameters` fills them.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        device: torch.device | str = "cpu",
        layers: range | None = None,
    ) -> None:
        super().__init__()
        layers = range(config.num_layers) if layers is None else layers
        self.config = config
        self.is_first = layers.start == 0
        self.is_last = layers.stop == config.num_layers
        dtype = getattr(torch, config.dtype)
        self._embedding_scale = _rounded(config.hidden_size**0.5)
        with torch.device("meta"):
            ends = (self.is_first, self.is_last)
            self.model = DecoderBody(config, layers, ends, dtype=dtype)
        if torch.device(device).type != "meta":
            self.to_empty(device=device)

    def forward(
        self,
        rows: Tensor,
        positions_S: Tensor | None = None,
        document_starts: Sequence[int] = (0,),
        caches: Sequence[KvCache] | None = None,
        dropout: DropoutKey | None = None,
    ) -> Tensor:
        """Hidden states after the last norm (of an inner stage: after its last layer), [S, D].

        Args:
            rows: token ids [S] on the first stage, hidden states [S, D] on later ones.
            positions_S: position of each row in its document; None: counted from each start, or
                from the end of each cache.
            document_starts: first row of each document.
            caches: one per document; rows are appended to them. None: training or scoring.
            dropout: what adapters' dropout depends on; needed when they train with dropout.
        """
        documents = Documents.from_starts(document_starts, rows.shape[0])
        assert caches is None or len(caches) == len(documents.lengths), "one cache per document"
        if positions_S is None:
            positions_S = self._positions(documents, caches, rows.device)
        x_SD = self._embed(rows) if self.is_first else rows
        context = RowContext(
            documents, self._rope(positions_S), None if caches is None else tuple(caches), dropout
        )
        for layer in self.model.layers.values():
            x_SD = layer(x_SD, context)
        for cache, length in zip(caches or (), documents.lengths):
            cache.commit(length)
        return self.model.norm(x_SD) if self.is_last else x_SD

    @property
    def head_weight(self) -> nn.Parameter:
        """The tied head [V, D], for `ops.loss.counted_cross_entropy`."""
        return self.model.embed_tokens.weight

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Logits [S, V] of these hidden states, in their dtype; pass only the rows you need."""
        logits_SV = F.linear(hidden_SD, self.head_weight)
        cap = self.config.logit_soft_cap
        return logits_SV if cap is None else cap * torch.tanh(logits_SV / cap)

    def _embed(self, tokens_S: Tensor) -> Tensor:
        rows_SD = self.model.embed_tokens(tokens_S)
        return rows_SD * self._embedding_scale[rows_SD.dtype]

    def _rope(self, positions_S: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return {
            kind.name: rope_table(positions_S, kind.head_dim, kind.rope_theta, kind.rope_factor)
            for kind in self.config.kinds
        }

    @staticmethod
    def _positions(
        documents: Documents, caches: Sequence[KvCache] | None, device: torch.device
    ) -> Tensor:
        positions_S = documents.positions(device)
        if caches is None:
            return positions_S
        past = [torch.full((n,), cache.length) for cache, n in zip(caches, documents.lengths)]
        return positions_S + torch.cat(past).to(device)


def _rounded(factor: float) -> dict[torch.dtype, float]:
    """The factor on the embedding, rounded to the dtype that computes, as transformers does."""
    dtypes = [getattr(torch, name) for name in DTYPE_BYTES]
    return {dtype: torch.tensor(factor, dtype=dtype).item() for dtype in dtypes}
