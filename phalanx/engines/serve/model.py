"""The serving form of a decoder: packed plain tensors, updatable in place, over a paged cache.

q, k and v are one matrix, gate and up another; norms are kept as 1 + w in float32. All are filled
from canonical tensors by slices.

Legend: S rows (tokens) of a step, R decoding requests (the first R rows), D model, H query heads,
K kv heads, G = H / K, C channels per head, F feed-forward, V vocabulary, T cached tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.engines.serve.kv import KindStep, KvPool
from phalanx.errors import JobError, nearest_names
from phalanx.models.spec import DecoderConfig
from phalanx.ops.attention import causal_attention
from phalanx.ops.rope import rope_table, rotate


class _Place(NamedTuple):
    """Where a canonical tensor of this shape goes; norms are stored with 1 added."""

    view: Tensor
    shape: tuple[int, ...]
    added: float = 0.0


@dataclass(frozen=True)
class PackedLayer:
    """The weights of one layer: qkv [(H + 2K) C, D], out [D, H C], gate_up [2F, D], down [D, F].

    Norms are 1 + w: qk_norm [H + K, C], the others [D].
    """

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    qk_norm: Tensor
    before_attention: Tensor
    after_attention: Tensor
    before_mlp: Tensor
    after_mlp: Tensor


class PackedDecoder:
    """A decoder of the Gemma 3 text family for serving; zero until `update` has filled it.

    Args:
        config: what to build; matrices get `config.dtype`.
        device: where.
    """

    def __init__(self, config: DecoderConfig, *, device: torch.device | str = "cpu") -> None:
        self.config, self.device = config, torch.device(device)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self._wide = torch.promote_types(self.dtype, torch.float32)
        self._places: dict[str, _Place] = {}
        d = config.hidden_size
        self.embedding = self._matrix({"model.embed_tokens": config.vocab_size}, d)
        self.norm = self._norm("model.norm", d)
        self.layers = [self._layer(at) for at in range(config.num_layers)]
        kinds = config.layer_kinds
        self._place_in_kind = [kinds[:at].count(kinds[at]) for at in range(len(kinds))]
        # the factor is rounded to the weights' dtype first, as transformers does
        self._embedding_scale = torch.tensor(d**0.5, dtype=self.dtype, device=self.device)

    def _matrix(self, num_rows: Mapping[str, int], num_columns: int) -> Tensor:
        """One matrix of the canonical ones with so many rows each."""
        total = sum(num_rows.values())
        packed = torch.zeros(total, num_columns, dtype=self.dtype, device=self.device)
        for (name, rows), view in zip(num_rows.items(), packed.split(list(num_rows.values()))):
            self._places[f"{name}.weight"] = _Place(view, (rows, num_columns))
        return packed

    def _norm(self, name: str, num_channels: int) -> Tensor:
        scale = torch.ones(num_channels, dtype=self._wide, device=self.device)
        self._places[f"{name}.weight"] = _Place(scale, (num_channels,), 1.0)
        return scale

    def _layer(self, layer: int) -> PackedLayer:
        kind, name = self.config.attention(layer), f"model.layers.{layer}"
        d, f, c = self.config.hidden_size, self.config.intermediate_size, kind.head_dim
        heads, kv_heads = kind.num_heads, kind.num_kv_heads
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        qkv = {f"{attention}.q_proj": heads * c}
        qkv |= {f"{attention}.{part}": kv_heads * c for part in ("k_proj", "v_proj")}
        qk_norm = torch.ones(heads + kv_heads, c, dtype=self._wide, device=self.device)
        for part, view in zip(("q_norm", "k_norm"), qk_norm.split((heads, kv_heads))):
            self._places[f"{attention}.{part}.weight"] = _Place(view, (c,), 1.0)
        return PackedLayer(
            qkv=self._matrix(qkv, d),
            out=self._matrix({f"{attention}.o_proj": d}, heads * c),
            gate_up=self._matrix({f"{mlp}.gate_proj": f, f"{mlp}.up_proj": f}, d),
            down=self._matrix({f"{mlp}.down_proj": d}, f),
            qk_norm=qk_norm,
            before_attention=self._norm(f"{name}.input_layernorm", d),
            after_attention=self._norm(f"{name}.post_attention_layernorm", d),
            before_mlp=self._norm(f"{name}.pre_feedforward_layernorm", d),
            after_mlp=self._norm(f"{name}.post_feedforward_layernorm", d),
        )

    @property
    def names(self) -> list[str]:
        """The canonical tensors that it is made of."""
        return list(self._places)

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

    @torch.inference_mode()
    def forward(
        self,
        tokens_S: Tensor,
        positions_S: Tensor,
        steps: Mapping[str, KindStep],
        pools: Mapping[str, KvPool],
    ) -> Tensor:
        """Hidden states after the last norm [S, D]; keys and values are stored on the way.

        Args:
            tokens_S: ids, the single rows of decoding requests first.
            positions_S: of each token in its request.
            steps, pools: per layer kind, as `PagedKv` gives them.
        """
        rope = {
            kind.name: rope_table(positions_S, kind.head_dim, kind.rope_theta, kind.rope_factor)
            for kind in self.config.kinds
        }
        x_SD = F.embedding(tokens_S, self.embedding) * self._embedding_scale
        for at, layer in enumerate(self.layers):
            kind = self.config.layer_kinds[at]
            normed_SD = self._normed(x_SD, layer.before_attention)
            attended_SD = self._attend(at, normed_SD, rope[kind], steps[kind], pools[kind])
            x_SD = x_SD + self._normed(attended_SD, layer.after_attention)
            gate_up = F.linear(self._normed(x_SD, layer.before_mlp), layer.gate_up)
            gate_SF, up_SF = gate_up.chunk(2, -1)
            fed_SD = F.linear(F.gelu(gate_SF, approximate="tanh").mul_(up_SF), layer.down)
            x_SD = x_SD + self._normed(fed_SD, layer.after_mlp)
        return self._normed(x_SD, self.norm)

    @torch.inference_mode()
    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Logits [S, V] in the weights' dtype; pass only the rows that are needed."""
        logits_SV = F.linear(hidden_SD, self.embedding)
        cap = self.config.logit_soft_cap
        return logits_SV if cap is None else cap * torch.tanh(logits_SV / cap)

    def _normed(self, x_SD: Tensor, scale_D: Tensor) -> Tensor:
        """As `ops.norm.rms_norm`, whose scale is already added up here."""
        wide = x_SD.to(self._wide)
        return F.rms_norm(wide, scale_D.shape, scale_D, self.config.norm_eps).to(self.dtype)

    def _attend(
        self, at: int, x_SD: Tensor, rope: tuple[Tensor, Tensor], step: KindStep, pool: KvPool
    ) -> Tensor:
        layer, kind, place = self.layers[at], pool.kind, self._place_in_kind[at]
        num_heads, num_kv_heads = kind.num_heads, kind.num_kv_heads
        qkv = F.linear(x_SD, layer.qkv).unflatten(-1, (-1, kind.head_dim))
        qk, v_SKC = qkv.split((num_heads + num_kv_heads, num_kv_heads), 1)
        qk = F.rms_norm(qk.to(self._wide), (kind.head_dim,), None, self.config.norm_eps)
        qk = rotate(qk.mul_(layer.qk_norm), *rope).to(self.dtype)
        q_SHC, k_SKC = qk.split((num_heads, num_kv_heads), 1)
        pool.write(place, step, k_SKC, v_SKC)
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
        return F.linear(out_SHC.flatten(-2), layer.out)


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
