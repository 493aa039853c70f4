"""One decoder for all families; its state dict is the set of canonical tensors.

Legend: S packed rows (tokens), D model, V vocabulary, L layers, P channels of a per-layer
embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.errors import PlanError
from phalanx.models.cache import KvCache
from phalanx.models.decoder_layers import (
    Attend,
    DecoderLayer,
    Projection,
    RmsNorm,
    RowContext,
    kind_rope,
)
from phalanx.models.spec import DTYPE_BYTES, DecoderConfig
from phalanx.ops.attention import Documents
from phalanx.ops.dropout import DropoutKey

__all__ = ["Decoder", "DecoderLayer", "Projection", "RmsNorm", "RowContext", "rounded"]


class DecoderBody(nn.Module):
    """Embedding, layers, last norm: everything below `model.` in canonical names."""

    def __init__(
        self, config: DecoderConfig, layers: Sequence[int], ends: tuple[bool, bool], **factory
    ):
        super().__init__()
        self.config = config
        first, last = ends
        d, offset = config.hidden_size, config.norm_offset
        if first or (last and config.tied_head):
            self.embed_tokens = nn.Embedding(config.vocab_size, d, **factory)
        if (ple := config.per_layer_embedding) is not None:
            channels = config.num_layers * ple.width
            self.embed_tokens_per_layer = nn.Embedding(ple.vocab_size, channels, **factory)
            self.per_layer_model_projection = Projection(d, channels, **factory)
            self.per_layer_projection_norm = RmsNorm(ple.width, config.norm_eps, offset, **factory)
        # a dict keyed by the global index: a pipeline stage keeps canonical names
        self.layers = nn.ModuleDict({str(at): DecoderLayer(config, at, **factory) for at in layers})
        if last:
            self.norm = RmsNorm(d, config.norm_eps, offset, **factory)


class Part(NamedTuple):
    """A stretch of a decoder: one stage of a pipeline.

    Attributes:
        layers: global indices, may be empty.
        embeds: it begins with the embedding; ends: it closes with the last norm.
    """

    layers: range
    embeds: bool
    ends: bool

    @classmethod
    def of(cls, config: DecoderConfig, layers: range) -> Part:
        """These layers, with the embedding before the first and the last norm behind the last."""
        return cls(layers, layers.start == 0, layers.stop == config.num_layers)


class Decoder(nn.Module):
    """A decoder, or what one rank of a pipeline holds of it.

    Args:
        config: what to build; weights get `config.dtype`.
        device: "meta" builds shapes only (fill with `load_parameters`).
        parts: the stages to hold, in model order; None: all of it as one.

    Weights are undefined until `parameters.load_parameters` fills them.

    Raises:
        JobError: `model/unknown` for a mixture of experts, which is not computed.
        PlanError: `plan/illegal` for a stage that needs what another one holds.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        device: torch.device | str = "cpu",
        parts: Sequence[Part] | None = None,
    ) -> None:
        super().__init__()
        self.parts = tuple(parts or [Part.of(config, range(config.num_layers))])
        for part in self.parts:
            _require_computable(config, part.layers)
        self.config = config
        self.is_first = any(part.embeds for part in self.parts)
        self.is_last = any(part.ends for part in self.parts)
        layers = [layer for part in self.parts for layer in part.layers]
        dtype = getattr(torch, config.dtype)
        self._embedding_scale = rounded(config.hidden_size**0.5)
        if config.per_layer_embedding is not None:
            self._per_layer_scale = rounded(config.per_layer_embedding.width**0.5)
        with torch.device("meta"):
            ends = (self.is_first, self.is_last)
            self.model = DecoderBody(config, layers, ends, dtype=dtype)
            if self.is_last and not config.tied_head:
                self.lm_head = Projection(config.hidden_size, config.vocab_size, dtype=dtype)
        if torch.device(device).type != "meta":
            self.to_empty(device=device)

    def forward(
        self,
        rows: Tensor,
        positions_S: Tensor | None = None,
        document_starts: Sequence[int] = (0,),
        caches: Sequence[KvCache] | None = None,
        dropout: DropoutKey | None = None,
        attend: Attend | None = None,
        part: Part | None = None,
    ) -> Tensor:
        """Hidden states after the last norm (of an inner stage: after its last layer), [S, D].

        Args:
            rows: token ids [S] where the part embeds, hidden states [S, D] where it does not.
            positions_S: position of each row in its document; None: counted from each start, or
                from the end of each cache. A stage that gets hidden states needs them where tokens
                are split (sequence parallelism): its rows are then fewer.
            document_starts: first row of each document.
            caches: one per document; rows are appended to them. None: training or scoring.
            dropout: what adapters' dropout depends on; needed when they train with dropout.
            attend: attention where ranks share the row; then `positions_S` are needed.
            part: the stage to run; None: the only one that it holds.
        """
        if part is None:
            assert len(self.parts) == 1, "which of the stages is to run?"
            part = self.parts[0]
        # a stage that splits tokens is handed this rank's; their positions are those of all
        length = rows.shape[0] if positions_S is None else positions_S.shape[0]
        documents = Documents.from_starts(document_starts, length)
        assert caches is None or len(caches) == len(documents.lengths), "one cache per document"
        if positions_S is None:
            positions_S = self._positions(documents, caches, rows.device)
        x_SD = self._embed(rows) if part.embeds else rows
        context = RowContext(
            documents,
            {kind.name: kind_rope(kind, positions_S) for kind in self.config.kinds},
            None if caches is None else tuple(caches),
            dropout,
            None if self.config.per_layer_embedding is None else self._per_layer(rows, x_SD),
            attend,
        )
        for at in part.layers:
            x_SD = self.model.layers[str(at)](x_SD, context)
        for cache, length in zip(caches or (), documents.lengths):
            cache.commit(length)
        return self.model.norm(x_SD) if part.ends else x_SD

    @property
    def head_weight(self) -> Tensor:
        """The head [V, D], tied or not, for `ops.loss.counted_cross_entropy`."""
        return self.model.embed_tokens.weight if self.config.tied_head else self.lm_head.weight

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Logits [S, V] of these hidden states, in their dtype; pass only the rows you need."""
        logits_SV = F.linear(hidden_SD, self.head_weight)
        cap = self.config.logit_soft_cap
        return logits_SV if cap is None else cap * torch.tanh(logits_SV / cap)

    def _embed(self, tokens_S: Tensor) -> Tensor:
        rows_SD = self.model.embed_tokens(tokens_S)
        if not self.config.scale_embedding:
            return rows_SD
        return rows_SD * self._embedding_scale[rows_SD.dtype]

    def _per_layer(self, tokens_S: Tensor, x_SD: Tensor) -> Tensor:
        """What tokens and their embeddings say to each layer, [S, L, P]."""
        own_SC = self.model.embed_tokens_per_layer(tokens_S)
        own_SC = own_SC * self._per_layer_scale[own_SC.dtype]
        projected_SC = self.model.per_layer_model_projection(x_SD) * self.config.hidden_size**-0.5
        shape = (self.config.num_layers, -1)
        projected_SLP = self.model.per_layer_projection_norm(projected_SC.unflatten(-1, shape))
        return (projected_SLP + own_SC.unflatten(-1, shape)) * 2.0**-0.5

    @staticmethod
    def _positions(
        documents: Documents, caches: Sequence[KvCache] | None, device: torch.device
    ) -> Tensor:
        positions_S = documents.positions(device)
        if caches is None:
            return positions_S
        past = [torch.full((n,), cache.length) for cache, n in zip(caches, documents.lengths)]
        return positions_S + torch.cat(past).to(device)


def _require_computable(config: DecoderConfig, layers: range) -> None:
    config.require_computable()
    where = "stage"
    if config.per_layer_embedding is not None and len(layers) < config.num_layers:
        rule = "per-layer embeddings need the tokens in every layer, which one stage only has"
        legal = [range(config.num_layers)]
        raise PlanError("plan/illegal", where, layers, rule, legal=legal)
    for layer in layers:
        if (source := config.kv_source(layer)) not in layers:
            rule = f"layer {layer} uses keys and values of layer {source}, which is not in it"
            legal = [range(source, layers.stop)]
            raise PlanError("plan/illegal", where, layers, rule, legal=legal)


def rounded(factor: float) -> dict[torch.dtype, float]:
    """A factor on an embedding, rounded to the dtype that computes, as transformers does."""
    dtypes = [getattr(torch, name) for name in DTYPE_BYTES]
    return {dtype: torch.tensor(factor, dtype=dtype).item() for dtype in dtypes}
