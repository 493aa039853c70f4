"""What a serving layer computes, as plain torch operators or with compiled kernels.

Legend: S rows (tokens) of a step, R decoding requests (the first R rows), D model, N heads that qkv
makes (queries, keys, values), H query heads, K kv heads, C channels per head, F feed-forward.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.engines.serve.kv import KindStep, KvPool
from phalanx.engines.serve.packed import PackedLayer
from phalanx.models.decoder_layers import Rope
from phalanx.models.spec import DecoderConfig
from phalanx.ops import native, paged_attention
from phalanx.ops.rope import rotate


class PlainWork:
    """Any dtype, any device; norms and rotations in at least float32, rounded once each.

    Args:
        config: norms, activation and scale of queries.
        dtype: of the weights.
    """

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        self.config, self.dtype = config, dtype
        self.wide = torch.promote_types(dtype, torch.float32)

    def product(self, x_SD: Tensor, weight_FD: Tensor) -> Tensor:
        """x W^T."""
        return F.linear(x_SD, weight_FD)

    def normed(self, x_SD: Tensor, scale_D: Tensor) -> Tensor:
        """As `ops.norm.rms_norm`, whose scale is already added up here."""
        wide = x_SD.to(self.wide)
        return F.rms_norm(wide, scale_D.shape, scale_D, self.config.norm_eps).to(self.dtype)

    def joined(
        self, x_SD: Tensor, y_SD: Tensor, after_D: Tensor | None, before_D: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x + norm(y), y itself without a scale, and the norm of that; x may be overwritten."""
        x_SD = x_SD + (y_SD if after_D is None else self.normed(y_SD, after_D))
        return x_SD, self.normed(x_SD, before_D)

    def gated(self, gate_up_SF: Tensor) -> Tensor:
        """activation(first half of each row) * second half."""
        return self.gated_by(*gate_up_SF.chunk(2, -1))

    def gated_by(self, gate_SF: Tensor, up_SF: Tensor) -> Tensor:
        """activation(gate) * up."""
        if self.config.activation == "silu":
            return F.silu(gate_SF).mul_(up_SF)
        return F.gelu(gate_SF, approximate="tanh").mul_(up_SF)

    def turned(
        self,
        made_SNC: Tensor,
        scale_HC: Tensor | None,
        rope: Rope,
        pool: KvPool,
        place: int,
        step: KindStep,
    ) -> Tensor:
        """Queries [S, H, C] from what qkv gave; keys and values go into the pool.

        Args:
            scale_HC: of the norm of queries and keys, or None.
            place: the layer of the pool.
        """
        num_heads, num_kv_heads = pool.kind.num_heads, pool.kind.num_kv_heads
        makes_kv = made_SNC.shape[1] > num_heads
        qk = made_SNC[:, : num_heads + num_kv_heads] if makes_kv else made_SNC
        qk = qk.to(self.wide)
        if scale_HC is not None:
            qk = F.rms_norm(qk, qk.shape[-1:], None, self.config.norm_eps).mul_(scale_HC)
        q_SHC, k_SKC = rotate(qk, *rope).to(self.dtype).tensor_split((num_heads,), 1)
        if makes_kv:
            v_SKC = made_SNC[:, -num_kv_heads:]  # the keys themselves where there are no values
            if self.config.value_norm:
                wide = v_SKC.to(self.wide)
                v_SKC = F.rms_norm(wide, wide.shape[-1:], None, self.config.norm_eps)
            pool.write(place, step, k_SKC, v_SKC)
        return q_SHC

    def decoded(self, q_RHC: Tensor, pool: KvPool, place: int, step: KindStep) -> Tensor:
        """Attention of one query row per request, [R, H, C]."""
        pools = pool.keys[place], pool.values[place]
        scale = self.config.query_scale
        return paged_attention.gathered(q_RHC, *pools, step.blocks_RN, step.seen_R2, scale)


class CompiledWork(PlainWork):
    """bfloat16 on CPUs: the same values with fewer passes over memory, rounded at the same places
    but for products and attention, which are rounded once."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        self._fits = all(
            kind.head_dim % native.HEAD_STEP == 0
            and kind.num_heads // kind.num_kv_heads <= native.MOST_GROUP
            for kind in config.kinds
        )

    def serves(self, weight: Tensor, pools: Iterable[KvPool]) -> bool:
        """Whether a model with such weights and these pools can be worked on."""
        return self._fits and native.serves(weight, *(pool.keys for pool in pools))

    def product(self, x_SD: Tensor, weight_FD: Tensor) -> Tensor:
        """As `ops.packed_linear`."""
        if x_SD.shape[0] > native.MOST_ROWS:
            return F.linear(x_SD, weight_FD)
        return native.packed_linear(x_SD, weight_FD)

    def normed(self, x_SD: Tensor, scale_D: Tensor) -> Tensor:
        """One pass."""
        if x_SD.dim() != 2:
            return self.normed(x_SD.flatten(0, -2), scale_D).view(x_SD.shape)
        x_SD = x_SD.contiguous()
        normed_SD = native.add_norm_(x_SD, None, None, scale_D, self.config.norm_eps)
        assert normed_SD is not None
        return normed_SD

    def joined(
        self, x_SD: Tensor, y_SD: Tensor, after_D: Tensor | None, before_D: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One pass."""
        normed_SD = native.add_norm_(x_SD, y_SD, after_D, before_D, self.config.norm_eps)
        assert normed_SD is not None
        return x_SD, normed_SD

    def gated(self, gate_up_SF: Tensor) -> Tensor:
        """One pass."""
        return native.gate_pairs(gate_up_SF, self.config.activation)

    def turned(
        self,
        made_SNC: Tensor,
        scale_HC: Tensor | None,
        rope: Rope,
        pool: KvPool,
        place: int,
        step: KindStep,
    ) -> Tensor:
        """One pass."""
        return native.turn_and_store(
            *(made_SNC, scale_HC, rope, step.rows_SK),
            (pool.keys[place], pool.values[place]),
            pool.kind.num_heads,
            eps=self.config.norm_eps,
            norms_values=self.config.value_norm,
        )

    def decoded(self, q_RHC: Tensor, pool: KvPool, place: int, step: KindStep) -> Tensor:
        """As `ops.paged_attention`."""
        pools, scale = (pool.keys[place], pool.values[place]), self.config.query_scale
        return native.paged_decode(q_RHC, *pools, step.blocks_RN, step.seen_R2, scale)

    def decode_layer_(
        self,
        x_SD: Tensor,
        normed_SD: Tensor,
        layer: PackedLayer,
        before_D: Tensor,
        rope: Rope,
        pool: KvPool,
        place: int,
        step: KindStep,
    ) -> None:
        """A layer of decoding rows in one call, in place: x and its norm before the next layer."""
        native.decode_layer_(
            x_SD,
            normed_SD,
            (layer.qkv, layer.out, layer.gate_up, layer.down),
            (layer.qk_norm, layer.after_attention, layer.before_mlp, layer.after_mlp, before_D),
            rope,
            (step.rows_SK, step.blocks_RN, step.seen_R2),
            (pool.keys[place], pool.values[place]),
            pool.kind.num_heads,
            activation=self.config.activation,
            norms_values=self.config.value_norm,
            scale=self.config.query_scale,
            eps=self.config.norm_eps,
        )
