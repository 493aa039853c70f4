"""The serving form of a decoder: packed plain tensors, updatable in place, over a paged cache.

q, k and v are one matrix, gate and up another; norms are kept as the scale they are, in float32.
All are filled from canonical tensors by slices (`packed`).

Legend: S rows (tokens) of a step, R decoding requests (the first R rows), D model, H query heads,
K kv heads, C channels per head, F feed-forward, V vocabulary, T cached tokens, L layers,
P channels of a per-layer embedding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.engines.serve.kv import KindStep, KvPool
from phalanx.engines.serve.layer_work import CompiledWork, PlainWork
from phalanx.engines.serve.packed import PackedWeights
from phalanx.models.decoder_layers import Rope, kind_rope
from phalanx.models.spec import DecoderConfig
from phalanx.ops import native, vocabulary_head
from phalanx.ops.attention import Documents, causal_attention, packed_attention

_OfKind = tuple[Rope, KvPool, int, KindStep]  # rotation, pool, layer of the pool, places


class LayerAdapters(Protocol):
    """Adapters of the rows of one step."""

    def add_(self, out_SF: Tensor, x_SD: Tensor, layer: int, matrix: str) -> None:
        """Add to the product `out_SF` of a layer's matrix with x.

        Args:
            matrix: "qkv", "out", "gate_up", "down", "per_layer.gate" or "per_layer.projection".
        """
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
        self.dtype = self.weights.dtype
        self._plain: PlainWork = PlainWork(config, self.dtype)
        self._compiled = CompiledWork(config, self.dtype)
        self._work = self._plain
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

    @property
    def is_compiled(self) -> bool:
        """Whether the last step was computed with compiled kernels."""
        return self._work is self._compiled

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
        is_compiled = self._compiled.serves(self.weights.head, pools.values())
        self._adapters, self._work = adapters, self._compiled if is_compiled else self._plain
        rope = {kind.name: kind_rope(kind, positions_S) for kind in self.config.kinds}
        x_SD = F.embedding(tokens_S, self.weights.embedding)
        if self.config.scale_embedding:
            x_SD = x_SD * self._embedding_scale
        per_layer_SLP = self._per_layer_inputs(tokens_S, x_SD)
        layers = self.weights.layers
        befores = [each.before_attention for each in layers[1:]] + [self.weights.norm]
        normed_SD = self._work.normed(x_SD, layers[0].before_attention)
        only_decodes = not any(step.segments for step in steps.values())
        in_one_call = only_decodes and self._decodes_whole_layers(len(tokens_S))
        for at, (layer, before) in enumerate(zip(layers, befores)):
            kind = self.config.layer_kinds[at]
            of_kind = rope[kind], pools[kind], self._place_in_pool[at], steps[kind]
            if in_one_call:
                self._compiled.decode_layer_(x_SD, normed_SD, layer, before, *of_kind)
            else:
                x_SD, normed_SD = self._layer(at, x_SD, normed_SD, before, of_kind, per_layer_SLP)
        return normed_SD

    def _decodes_whole_layers(self, num_rows: int) -> bool:
        """Whether nothing happens in a layer but what the compiled whole of it does."""
        config = self.config
        has_more = config.per_layer_embedding is not None or config.layer_scalar
        is_bare = self._adapters is None and not has_more
        return self.is_compiled and is_bare and num_rows <= native.MOST_ROWS

    def _layer(
        self,
        at: int,
        x_SD: Tensor,
        normed_SD: Tensor,
        before_D: Tensor,
        of_kind: _OfKind,
        per_layer_SLP: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The stream after a layer, and its norm before the next one."""
        layer, work = self.weights.layers[at], self._work
        made_SD = self._attend(at, normed_SD, *of_kind)
        x_SD, normed_SD = work.joined(x_SD, made_SD, layer.after_attention, layer.before_mlp)
        fed_SD = self._feed(at, normed_SD)
        x_SD, normed_SD = work.joined(x_SD, fed_SD, layer.after_mlp, before_D)
        if per_layer_SLP is not None:
            x_SD = x_SD + self._of_this_layer(at, x_SD, per_layer_SLP[:, at])
        if layer.scalar is not None:
            x_SD = x_SD * layer.scalar
        if per_layer_SLP is not None or layer.scalar is not None:
            normed_SD = work.normed(x_SD, before_D)
        return x_SD, normed_SD

    @torch.inference_mode()
    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Logits [S, V], as `ops.vocabulary_head.logits`; pass only the rows that are needed."""
        return vocabulary_head.logits(hidden_SD, self.weights.head, self.config.logit_soft_cap)

    @torch.inference_mode()
    def greedy(self, hidden_RD: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of the largest logits [R] and these, as `ops.vocabulary_head.greedy`."""
        return vocabulary_head.greedy(hidden_RD, self.weights.head, self.config.logit_soft_cap)

    @torch.inference_mode()
    def best(self, hidden_RD: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The largest logits [R, N] and their tokens, as `ops.vocabulary_head.best`."""
        return vocabulary_head.best(hidden_RD, self.weights.head, count, self.config.logit_soft_cap)

    def _feed(self, at: int, x_SD: Tensor) -> Tensor:
        return self._product(self._work.gated(self._product(x_SD, at, "gate_up")), at, "down")

    def _product(self, x_SD: Tensor, at: int, matrix: str) -> Tensor:
        """x W^T of a layer's matrix, and what adapters add."""
        out_SF = self._work.product(x_SD, attrgetter(matrix)(self.weights.layers[at]))
        if self._adapters is not None:
            self._adapters.add_(out_SF, x_SD, at, matrix)
        return out_SF

    def _per_layer_inputs(self, tokens_S: Tensor, x_SD: Tensor) -> Tensor | None:
        """As `models.decoder.Decoder`, [S, L, P]."""
        if self.weights.per_layer_embedding is None:
            return None
        embedding, projection, norm_P = self.weights.per_layer_embedding
        own_SC = F.embedding(tokens_S, embedding) * self._per_layer_scale
        projected_SC = self._work.product(x_SD, projection) * self.config.hidden_size**-0.5
        shape = (self.config.num_layers, -1)
        projected_SLP = self._work.normed(projected_SC.unflatten(-1, shape), norm_P)
        return (projected_SLP + own_SC.unflatten(-1, shape)) * 2.0**-0.5

    def _of_this_layer(self, at: int, x_SD: Tensor, per_layer_SP: Tensor) -> Tensor:
        own = self.weights.layers[at].per_layer
        assert own is not None
        gate_SP = self._product(x_SD, at, "per_layer.gate")
        gated_SP = self._work.gated_by(gate_SP, per_layer_SP)
        return self._work.normed(self._product(gated_SP, at, "per_layer.projection"), own.norm)

    def _attend(
        self, at: int, x_SD: Tensor, rope: Rope, pool: KvPool, place: int, step: KindStep
    ) -> Tensor:
        layer, kind = self.weights.layers[at], pool.kind
        made_SNC = self._product(x_SD, at, "qkv").unflatten(-1, (-1, kind.head_dim))
        q_SHC = self._work.turned(made_SNC, layer.qk_norm, rope, pool, place, step)
        parts = []
        if num_single := step.blocks_RN.shape[0]:
            parts.append(self._work.decoded(q_SHC[:num_single], pool, place, step))
        for each in step.segments:
            k_TKC, v_TKC = (
                part[:, : each.length - each.first].transpose(0, 1).to(self.dtype)
                for part in pool.read(place, each.blocks)
            )
            q, options = q_SHC[each.start : each.end], {"scale": self.config.query_scale}
            options["window"] = kind.window
            if each.length == len(q):  # a whole prompt is a document, as in training
                whole = Documents((0, each.length))
                own = (k_TKC.contiguous(), v_TKC.contiguous())
                parts.append(packed_attention(q.contiguous(), *own, whole, **options))
            else:
                parts.append(causal_attention(q, k_TKC, v_TKC, **options))
        out_SHC = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._product(out_SHC.flatten(-2), at, "out")
