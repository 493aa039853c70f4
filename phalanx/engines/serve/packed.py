"""Packed weights of a decoder, and where the slices of canonical tensors go in them.

Legend: D model, H query heads, K kv heads, C channels per head, F feed-forward, V vocabulary,
L layers, P channels of a per-layer embedding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.errors import JobError, nearest_names
from phalanx.models.spec import DecoderConfig


class _Place(NamedTuple):
    """Where a canonical tensor of this shape goes; norms are stored with their offset added."""

    view: Tensor
    shape: tuple[int, ...]
    added: float = 0.0


@dataclass(frozen=True)
class PackedPerLayer:
    """What a layer makes of its per-layer embedding: gate [P, D], projection [D, P], norm [D]."""

    gate: Tensor
    projection: Tensor
    norm: Tensor


@dataclass(frozen=True)
class PackedLayer:
    """The weights of one layer: qkv [(H + K + K) C, D], out [D, H C], gate_up [2F, D], down [D, F].

    A layer without values of its own has one K less in qkv, one that uses another layer's keys and
    values two. Norms are offset + w: qk_norm [H + K, C], the others [D]; None where a family has
    no such norm.
    """

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    qk_norm: Tensor | None
    before_attention: Tensor
    after_attention: Tensor | None
    before_mlp: Tensor
    after_mlp: Tensor | None
    per_layer: PackedPerLayer | None
    scalar: Tensor | None


class PackedWeights:
    """All weights of a decoder; zero until `update` has filled them.

    Attributes:
        embedding, head: [V, D], the same one where they are tied.
        norm: the last one, [D].
        layers: in order.
        per_layer_embedding: [V, L P], its projection [L P, D] and norm [P]; None where the family
            has none.
    """

    def __init__(self, config: DecoderConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self._places: dict[str, _Place] = {}
        self._packed: list[Tensor] = []
        d = config.hidden_size
        self.embedding = self._matrix({"model.embed_tokens": config.vocab_size}, d)
        self.head = self.embedding
        if not config.tied_head:
            self.head = self._matrix({"lm_head": config.vocab_size}, d)
        self.norm = self._norm("model.norm", d)
        self.per_layer_embedding: tuple[Tensor, Tensor, Tensor] | None = None
        if (ple := config.per_layer_embedding) is not None:
            channels = config.num_layers * ple.width
            self.per_layer_embedding = (
                self._matrix({"model.embed_tokens_per_layer": ple.vocab_size}, channels),
                self._matrix({"model.per_layer_model_projection": channels}, d),
                self._norm("model.per_layer_projection_norm", ple.width),
            )
        self.layers = [self._layer(at) for at in range(config.num_layers)]

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self._packed.append(torch.zeros(shape, dtype=dtype, device=self.device))
        return self._packed[-1]

    def _matrix(self, num_rows: Mapping[str, int], num_columns: int) -> Tensor:
        """One matrix of the canonical ones with so many rows each."""
        total = sum(num_rows.values())
        packed = self._new((total, num_columns), self.dtype)
        for (name, rows), view in zip(num_rows.items(), packed.split(list(num_rows.values()))):
            self._places[f"{name}.weight"] = _Place(view, (rows, num_columns))
        return packed

    def _norm(self, name: str, num_channels: int) -> Tensor:
        scale = self._new((num_channels,), self.wide)
        self._places[f"{name}.weight"] = _Place(scale, (num_channels,), self.config.norm_offset)
        return scale

    def _layer(self, layer: int) -> PackedLayer:
        config, name = self.config, f"model.layers.{layer}"
        d, f, kind = config.hidden_size, config.ffn_width(layer), config.attention(layer)
        sandwich = config.sandwich_norms
        before_mlp = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
        heads = self._heads(layer)
        widths = {f"{name}.self_attn.{part}_proj": n * kind.head_dim for part, n in heads}
        return PackedLayer(
            qkv=self._matrix(widths, d),
            out=self._matrix({f"{name}.self_attn.o_proj": d}, kind.num_heads * kind.head_dim),
            gate_up=self._matrix({f"{name}.mlp.{part}_proj": f for part in ("gate", "up")}, d),
            down=self._matrix({f"{name}.mlp.down_proj": d}, f),
            qk_norm=self._qk_norm(f"{name}.self_attn", heads, kind.head_dim),
            before_attention=self._norm(f"{name}.input_layernorm", d),
            after_attention=(
                self._norm(f"{name}.post_attention_layernorm", d) if sandwich else None
            ),
            before_mlp=self._norm(f"{name}.{before_mlp}", d),
            after_mlp=self._norm(f"{name}.post_feedforward_layernorm", d) if sandwich else None,
            per_layer=self._per_layer(name),
            scalar=self._scalar(f"{name}.layer_scalar") if config.layer_scalar else None,
        )

    def _heads(self, layer: int) -> list[tuple[str, int]]:
        """(q, k or v; heads of it) that a layer makes."""
        kind = self.config.attention(layer)
        heads = [("q", kind.num_heads)]
        if self.config.kv_source(layer) == layer:
            heads.append(("k", kind.num_kv_heads))
            if not kind.key_is_value:
                heads.append(("v", kind.num_kv_heads))
        return heads

    def _qk_norm(
        self, attention: str, heads: list[tuple[str, int]], channels: int
    ) -> Tensor | None:
        if not self.config.qk_norm:
            return None
        normed = heads[:2]
        total = sum(count for _, count in normed)
        scale = self._new((total, channels), self.wide)
        for (part, _), view in zip(normed, scale.split([count for _, count in normed])):
            name = f"{attention}.{part}_norm.weight"
            self._places[name] = _Place(view, (channels,), self.config.norm_offset)
        return scale

    def _per_layer(self, name: str) -> PackedPerLayer | None:
        if self.config.per_layer_embedding is None:
            return None
        d, width = self.config.hidden_size, self.config.per_layer_embedding.width
        return PackedPerLayer(
            self._matrix({f"{name}.per_layer_input_gate": width}, d),
            self._matrix({f"{name}.per_layer_projection": d}, width),
            self._norm(f"{name}.post_per_layer_input_norm", d),
        )

    def _scalar(self, name: str) -> Tensor:
        scalar = self._new((1,), self.dtype)
        self._places[name] = _Place(scalar, (1,))
        return scalar

    @property
    def names(self) -> list[str]:
        """The canonical tensors that they are made of."""
        return list(self._places)

    def free(self) -> None:
        """Give the memory back; shapes and places stay."""
        for tensor in self._packed:
            tensor.untyped_storage().resize_(0)

    def allocate(self) -> None:
        """Take memory again after `free`, for tensors that are zero until `update`."""
        for tensor in self._packed:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0:
                storage.resize_(tensor.numel() * tensor.element_size())
                tensor.zero_()

    @torch.no_grad()
    def update(self, tensors: Iterable[tuple[str, Tensor]], *, strict: bool = True) -> None:
        """Copy whole canonical tensors into place.

        Args:
            strict: demand every tensor of the model.

        Raises:
            JobError: `model/tensor` for an unknown name, a wrong shape or, if strict, missing ones.
        """
        missing = set(self._places)
        for name, whole in tensors:
            place = self._places.get(name)
            if place is None:
                rule, near = "is no tensor of this model", nearest_names(name, self._places)
                raise JobError("model/tensor", "weights", name, rule, legal=near)
            if place.shape != tuple(whole.shape):
                rule = f"must have the shape {place.shape}"
                raise JobError("model/tensor", name, tuple(whole.shape), rule)
            place.view.copy_(whole)
            if place.added:
                place.view.add_(place.added)
            missing.discard(name)
        if strict and missing:
            rule, near = f"{len(missing)} tensors of the model are missing", sorted(missing)[:3]
            raise JobError("model/tensor", "weights", None, rule, legal=near)
