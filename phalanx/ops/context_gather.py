"""Attention on keys and values that a rank has gathered, all or those that it sees; gradients.

Legend: S tokens of the row, N ranks, c tokens of a rank, T keys that it has, H query heads, K
key/value heads, L = 2K, C channels per head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.layout.token_layout import KeysSeen
from phalanx.ops.partial_attention import partial_attention, partial_attention_backward
from phalanx.ops.placed import placed


def _stretch(
    q_cHC: Tensor, k_TKC: Tensor, v_TKC: Tensor, seen: KeysSeen, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention on all the keys that the queries see: out in the dtype of q, and lse."""
    out_cHC, lse_cH = partial_attention(q_cHC, k_TKC, v_TKC, seen, scale=scale)
    return out_cHC.to(q_cHC.dtype), lse_cH


class GatheredAttention(torch.autograd.Function):
    """forward(q, k, v, part, group, scale, window, sum_dtype) -> out."""

    @staticmethod
    def forward(ctx, q_cHC, k_cKC, v_cKC, part, group, scale, window, sum_dtype):
        length, kv = len(k_cKC), torch.cat([k_cKC, v_cKC])
        rows = kv.new_empty(group.size() * len(kv), *kv.shape[1:])
        dist.all_gather_single(rows, kv, group=group)
        at_S = part.layout.inverse_S
        at_S = placed(at_S + at_S // length * length, kv.device)  # a rank's v follow k
        k_SKC, v_SKC = rows[at_S], rows[at_S + length]
        out_cHC, lse_cH = _stretch(q_cHC, k_SKC, v_SKC, part.row_seen(window), scale)
        ctx.save_for_backward(q_cHC, k_SKC, v_SKC, out_cHC, lse_cH)
        ctx.options = (part, group, scale, window, sum_dtype or lse_cH.dtype)
        return out_cHC

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_cHC):
        q_cHC, k_SKC, v_SKC, out_cHC, lse_cH = ctx.saved_tensors
        part, group, scale, window, sum_dtype = ctx.options
        seen = part.row_seen(window)
        grads = partial_attention_backward(
            grad_cHC, q_cHC, k_SKC, v_SKC, out_cHC, lse_cH, seen, scale=scale
        )
        at_S = placed(part.layout.permutation_S, grad_cHC.device)
        by_rank = [x[at_S].to(sum_dtype).unflatten(0, (group.size(), -1)) for x in grads[1:]]
        rows = torch.cat(by_rank, dim=1).flatten(0, 1)
        own = rows.new_empty(2 * len(q_cHC), *rows.shape[1:])
        dist.reduce_scatter_single(own, rows, group=group)
        grad_kv = own.to(k_SKC.dtype).chunk(2)
        return grads[0].to(q_cHC.dtype), *grad_kv, *[None] * 5


class WantedAttention(torch.autograd.Function):
    """forward(q, k, v, part, group, scale, window) -> out."""

    @staticmethod
    def forward(ctx, q_cHC, k_cKC, v_cKC, part, group, scale, window):
        wanted = part.wanted(window)
        kv_cLC = torch.cat([k_cKC, v_cKC], dim=1)  # both of a token together
        sent = kv_cLC[placed(wanted.sent_T, kv_cLC.device)]
        came = _swapped(sent, wanted.num_sent, wanted.num_came, group)
        kv_TLC = torch.cat([kv_cLC, came])[placed(wanted.order_T, kv_cLC.device)]
        k_TKC, v_TKC = kv_TLC.chunk(2, dim=1)
        out_cHC, lse_cH = _stretch(q_cHC, k_TKC, v_TKC, wanted.seen, scale)
        ctx.save_for_backward(q_cHC, k_TKC, v_TKC, out_cHC, lse_cH)
        ctx.options = (wanted, group, scale)
        return out_cHC

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_cHC):
        q_cHC, k_TKC, v_TKC, out_cHC, lse_cH = ctx.saved_tensors
        wanted, group, scale = ctx.options
        grad_q_cHC, *grads = partial_attention_backward(
            grad_cHC, q_cHC, k_TKC, v_TKC, out_cHC, lse_cH, wanted.seen, scale=scale
        )
        at_T = placed(np.argsort(wanted.order_T), grad_cHC.device)
        grad_TLC = torch.cat(grads, dim=1)[at_T]
        own_cLC, others = grad_TLC[: len(q_cHC)], grad_TLC[len(q_cHC) :]
        back = _swapped(others.contiguous(), wanted.num_came, wanted.num_sent, group)
        own_cLC.index_add_(0, placed(wanted.sent_T, grad_cHC.device), back)
        grad_kv = (x.to(k_TKC.dtype) for x in own_cLC.chunk(2, dim=1))
        return grad_q_cHC.to(q_cHC.dtype), *grad_kv, None, None, None, None


def _swapped(
    rows: Tensor, num_sent: Sequence[int], num_came: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    came = rows.new_empty(sum(num_came), *rows.shape[1:])
    dist.all_to_all_single(came, rows, list(num_came), list(num_sent), group=group)
    return came
