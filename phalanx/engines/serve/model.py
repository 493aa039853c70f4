"""The serving form of a decoder: packed plain tensors, updatable in place, over a paged cache.

q, k and v are one matrix, gate and up another; norms are kept as the scale they are, in float32.
All are filled from canonical tensors by slices (`packed`).

Legend: S rows (tokens) of a step, R decoding requests (the first R rows), D model, H query heads,
K kv heads, G = H / K, C channels per head, F feed-forward, V vocabulary, T cached tokens, L layers,
P channels of a per-layer embedding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.engines.serve.kv import KindStep, KvPool
from phalanx.engines.serve.packed import PackedLayer, PackedWeights
from phalanx.models.decoder_layers import Rope, kind_rope
from phalanx.models.spec import DecoderConfig
from phalanx.ops import vocabulary_head
from phalanx.ops.attention import causal_attention
from phalanx.ops.rope import rotate


class LayerAdapters(Protocol):
    """Adapters of the rows of one step."""

    def add_(self, out_SF: Tensor, x_SD: Tensor, layer: int, matrix: str) -> None:
        """Add to the product `out_SF` of a layer's "qkv", "out", "gate_up" or "down" with x."""
        ...


class PackedDecoder:
    """A decoder of any family for serving; zero until `update` has filled it.

    Args:
        config: what to build; matrices get `config.dtype`.
        device: where.

    Raises:
        JobError: `model/unknown` for a mixture of experts, which is not computed.
    """

    def __init__(self, config: DecoderConfig, *, device: torch.device | str = "cpu") -> None:
        config.require_computable()
        self.config, self.device = config, torch.device(device)
        self.weights = PackedWeights(config, self.device)
        self.dtype, self._wide = self.weights.dtype, self.weights.wide
        self._adapters: LayerAdapters | None = None
        of_kind = {kind.name: config.kv_layers(kind.name) for kind in config.kinds}
        # the layer of its kind's pool that holds the keys and values which each layer uses
        self._place_in_pool = [
            of_kind[name].index(config.kv_source(at)) for at, name in enumerate(config.layer_kinds)
        ]
        # factors on embeddings are rounded to the weights' dtype first, as transformers does
        self._embedding_scale = self._rounded(config.hidden_size)
        if config.per_layer_embedding is not None:
            self._per_layer_scale = self._rounded(config.per_layer_embedding.width)

    def _rounded(self, width: int) -> Tensor:
        return torch.tensor(width**0.5, dtype=self.dtype, device=self.device)

    @property
    def names(self) -> list[str]:
        """The canonical tensors that it is made of."""
        return self.weights.names

    def update(self, tensors: Iterable[tuple[str, Tensor]], *, strict: bool = True) -> None:
        """Copy whole canonical tensors into place, as `PackedWeights.update`."""
        self.weights.update(tensors, strict=strict)

    def free(self) -> None:
        """Give the memory of the weights back; nothing may be computed until `allocate`."""
        self.weights.free()

    def allocate(self) -> None:
        """Take memory for the weights again after `free`; zero until `update` has filled them."""
        self.weights.allocate()

    @torch.inference_mode()
    def forward(
        self,
        tokens_S: Tensor,
        positions_S: Tensor,
        steps: Mapping[str, KindStep],
        pools: Mapping[str, KvPool],
        adapters: LayerAdapters | None = None,
    ) -> Tensor:
        """Hidden states after the last norm [S, D]; keys and values are stored on the way.

        Args:
            tokens_S: ids, the single rows of decoding requests first.
            positions_S: of each token in its request.
            steps, pools: per layer kind, as `PagedKv` gives them.
            adapters: what to add to the layers' products.
        """
        self._adapters = adapters
        rope = {kind.name: kind_rope(kind, positions_S) for kind in self.config.kinds}
        x_SD = F.embedding(tokens_S, self.weights.embedding)
        if self.config.scale_embedding:
            x_SD = x_SD * self._embedding_scale
        per_layer_SLP = self._per_layer_inputs(tokens_S, x_SD)
        for at, layer in enumerate(self.weights.layers):
            kind = self.config.layer_kinds[at]
            normed_SD = self._normed(x_SD, layer.before_attention)
            attended_SD = self._attend(at, normed_SD, rope[kind], steps[kind], pools[kind])
            x_SD = x_SD + self._normed(attended_SD, layer.after_attention)
            fed_SD = self._feed(at, self._normed(x_SD, layer.before_mlp))
            x_SD = x_SD + self._normed(fed_SD, layer.after_mlp)
            if per_layer_SLP is not None:
                x_SD = x_SD + self._of_this_layer(layer, x_SD, per_layer_SLP[:, at])
            if layer.scalar is not None:
                x_SD = x_SD * layer.scalar
        return self._normed(x_SD, self.weights.norm)

    @torch.inference_mode()
    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Logits [S, V] in the weights' dtype; pass only the rows that are needed."""
        logits_SV = F.linear(hidden_SD, self.weights.head)
        cap = self.config.logit_soft_cap
        return logits_SV if cap is None else cap * torch.tanh(logits_SV / cap)

    @torch.inference_mode()
    def greedy(self, hidden_RD: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of the largest logits [R] and these, as `ops.vocabulary_head.greedy`."""
        return vocabulary_head.greedy(hidden_RD, self.weights.head, self.config.logit_soft_cap)

    @torch.inference_mode()
    def best(self, hidden_RD: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The largest logits [R, N] and their tokens, as `ops.vocabulary_head.best`."""
        return vocabulary_head.best(hidden_RD, self.weights.head, count, self.config.logit_soft_cap)

    def _normed(self, x_SD: Tensor, scale_D: Tensor | None) -> Tensor:
        """As `ops.norm.rms_norm`, whose scale is already added up here; None: no norm."""
        if scale_D is None:
            return x_SD
        wide = x_SD.to(self._wide)
        return F.rms_norm(wide, scale_D.shape, scale_D, self.config.norm_eps).to(self.dtype)

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.config.activation == "silu":
            return F.silu(gate).mul_(up)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def _feed(self, at: int, x_SD: Tensor) -> Tensor:
        gate_SF, up_SF = self._product(x_SD, at, "gate_up").chunk(2, -1)
        return self._product(self._gated(gate_SF, up_SF), at, "down")

    def _product(self, x_SD: Tensor, at: int, matrix: str) -> Tensor:
        """x W^T of a layer's matrix, and what adapters add."""
        out_SF = F.linear(x_SD, getattr(self.weights.layers[at], matrix))
        if self._adapters is not None:
            self._adapters.add_(out_SF, x_SD, at, matrix)
        return out_SF

    def _per_layer_inputs(self, tokens_S: Tensor, x_SD: Tensor) -> Tensor | None:
        """As `models.decoder.Decoder`, [S, L, P]."""
        if self.weights.per_layer_embedding is None:
            return None
        embedding, projection, norm_P = self.weights.per_layer_embedding
        own_SC = F.embedding(tokens_S, embedding) * self._per_layer_scale
        projected_SC = F.linear(x_SD, projection) * self.config.hidden_size**-0.5
        shape = (self.config.num_layers, -1)
        projected_SLP = self._normed(projected_SC.unflatten(-1, shape), norm_P)
        return (projected_SLP + own_SC.unflatten(-1, shape)) * 2.0**-0.5

    def _of_this_layer(self, layer: PackedLayer, x_SD: Tensor, per_layer_SP: Tensor) -> Tensor:
        assert layer.per_layer is not None
        gated_SP = self._gated(F.linear(x_SD, layer.per_layer.gate), per_layer_SP)
        return self._normed(F.linear(gated_SP, layer.per_layer.projection), layer.per_layer.norm)

    def _attend(self, at: int, x_SD: Tensor, rope: Rope, step: KindStep, pool: KvPool) -> Tensor:
        layer, kind, place = self.weights.layers[at], pool.kind, self._place_in_pool[at]
        heads = self._product(x_SD, at, "qkv").unflatten(-1, (-1, kind.head_dim))
        q_SHC = self._turned(heads, layer, rope, pool, place, step)
        scale, parts = self.config.query_scale, []
        if num_single := step.blocks_RN.shape[0]:
            keys, values = pool.read(place, step.blocks_RN)
            parts.append(paged_decode(q_SHC[:num_single], keys, values, step.seen_RT, scale))
        for each in step.segments:
            k_TKC, v_TKC = (
                part[:, : each.length - each.first].transpose(0, 1).to(self.dtype)
                for part in pool.read(place, each.blocks)
            )
            q = q_SHC[each.start : each.end]
            parts.append(causal_attention(q, k_TKC, v_TKC, scale=scale, window=kind.window))
        out_SHC = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._product(out_SHC.flatten(-2), at, "out")

    def _turned(
        self,
        heads: Tensor,
        layer: PackedLayer,
        rope: Rope,
        pool: KvPool,
        place: int,
        step: KindStep,
    ) -> Tensor:
        """Queries [S, H, C] from what qkv gave; keys and values go into the pool."""
        num_heads, num_kv_heads = pool.kind.num_heads, pool.kind.num_kv_heads
        makes_kv = heads.shape[1] > num_heads
        qk = heads[:, : num_heads + num_kv_heads] if makes_kv else heads
        qk = qk.to(self._wide)
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, qk.shape[-1:], None, self.config.norm_eps).mul_(layer.qk_norm)
        q_SHC, k_SKC = rotate(qk, *rope).to(self.dtype).tensor_split((num_heads,), 1)
        if makes_kv:
            v_SKC = heads[:, -num_kv_heads:]  # the keys themselves where there are no values
            if self.config.value_norm:
                wide = v_SKC.to(self._wide)
                v_SKC = F.rms_norm(wide, wide.shape[-1:], None, self.config.norm_eps)
            pool.write(place, step, k_SKC, v_SKC)
        return q_SHC


def paged_decode(
    q_RHC: Tensor, k_RKTC: Tensor, v_RKTC: Tensor, seen_RT: Tensor, scale: float
) -> Tensor:
    """Attention of one query row per request over its gathered tokens, [R, H, C].

    The G query heads of a kv head stand as G query rows, so that nothing is repeated.
    """
    out_RKGC = F.scaled_dot_product_attention(
        q_RHC.unflatten(1, (k_RKTC.shape[1], -1)),
        k_RKTC.to(q_RHC.dtype),
        v_RKTC.to(q_RHC.dtype),
        attn_mask=seen_RT[:, None, None, :],
        scale=scale,
    )
    return out_RKGC.flatten(1, 2)
