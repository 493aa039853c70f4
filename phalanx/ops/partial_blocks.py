"""Partial attention in plain torch operators, a block of queries at a time.

A block meets the keys from the first to the last that any of its queries sees; scores, softmax and
sums are at least float32.

Legend: Q query rows, T key rows, H query heads, K key/value heads, C channels per head; within a
block R rows of a key/value head, which are its query heads times queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.layout.token_layout import KeysSeen
from phalanx.ops.partial_sum import finite
from phalanx.ops.placed import placed

_QUERY_BLOCK = 128  # a block's scores stay in cache


def blocked_forward(
    q_QHC: Tensor, k_TKC: Tensor, v_TKC: Tensor, seen: KeysSeen, scale: float
) -> tuple[Tensor, Tensor]:
    """(out, lse), as `partial_attention` gives them."""
    wide = torch.promote_types(q_QHC.dtype, torch.float32)
    out_QHC = q_QHC.new_zeros(q_QHC.shape, dtype=wide)
    lse_QH = q_QHC.new_full(q_QHC.shape[:2], -torch.inf, dtype=wide)
    k_KCT, v_KTC = k_TKC.to(wide).permute(1, 2, 0), v_TKC.to(wide).transpose(0, 1)
    for block in _blocks(seen, q_QHC.device):
        q_KRC = _by_group(q_QHC[block.rows].to(wide) * scale, k_TKC.shape[1])
        scores_KRT = block.mask_(torch.bmm(q_KRC, k_KCT[..., block.keys]))
        peak_KR1 = finite(scores_KRT.amax(-1, keepdim=True))
        weights_KRT = scores_KRT.sub_(peak_KR1).exp_()
        sum_KR1 = weights_KRT.sum(-1, keepdim=True)
        mean_KRC = torch.bmm(weights_KRT, v_KTC[:, block.keys]) / sum_KR1.clamp_min(1e-30)
        out_QHC[block.rows] = _by_row(mean_KRC, block)
        lse_QH[block.rows] = _by_row(peak_KR1 + sum_KR1.log(), block).squeeze(-1)
    return out_QHC, lse_QH


def blocked_backward(
    grad_QHC: Tensor,
    q_QHC: Tensor,
    k_TKC: Tensor,
    v_TKC: Tensor,
    lse_QH: Tensor,
    slope_QH: Tensor,
    seen: KeysSeen,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, as `partial_attention_backward` gives them."""
    wide = torch.promote_types(q_QHC.dtype, torch.float32)
    grad_q_QHC = q_QHC.new_zeros(q_QHC.shape, dtype=wide)
    k_KTC, v_KTC = (x.to(wide).transpose(0, 1) for x in (k_TKC, v_TKC))
    grad_k_KTC, grad_v_KTC = torch.zeros_like(k_KTC), torch.zeros_like(v_KTC)
    num_groups = k_TKC.shape[1]
    lse_QH = finite(lse_QH)
    for block in _blocks(seen, q_QHC.device):
        rows, keys = block.rows, block.keys
        q_KRC = _by_group(q_QHC[rows].to(wide) * scale, num_groups)
        grad_KRC = _by_group(grad_QHC[rows].to(wide), num_groups)
        lse_KR1, slope_KR1 = (
            _by_group(x_QH[rows].unsqueeze(-1), num_groups) for x_QH in (lse_QH, slope_QH)
        )
        scores_KRT = block.mask_(torch.bmm(q_KRC, k_KTC[:, keys].mT))
        p_KRT = scores_KRT.sub_(lse_KR1).exp_()
        grad_v_KTC[:, keys] += p_KRT.mT @ grad_KRC
        grad_s_KRT = (grad_KRC @ v_KTC[:, keys].mT).sub_(slope_KR1).mul_(p_KRT)
        grad_q_QHC[rows] = _by_row(grad_s_KRT @ k_KTC[:, keys], block)
        grad_k_KTC[:, keys] += grad_s_KRT.mT @ q_KRC
    return grad_q_QHC.mul_(scale), grad_k_KTC.transpose(0, 1), grad_v_KTC.transpose(0, 1)


@dataclass(frozen=True)
class _Block:
    """Queries and the keys that any of them sees.

    Attributes:
        first_R1, last_R1: of each query, counted within `keys`.
        all_see: the keys, counted so, that all queries see; empty where there are none.
    """

    rows: slice
    keys: slice
    first_R1: Tensor
    last_R1: Tensor
    all_see: slice

    def mask_(self, scores_KRT: Tensor) -> Tensor:
        """Set what a query does not see to -inf, in place."""
        per_query = scores_KRT.unflatten(1, (-1, len(self.first_R1)))
        for start, end in ((0, self.all_see.start), (self.all_see.stop, scores_KRT.shape[-1])):
            key_T = torch.arange(start, end, device=scores_KRT.device)
            unseen = (key_T < self.first_R1) | (key_T >= self.last_R1)
            per_query[..., start:end].masked_fill_(unseen, -torch.inf)
        return scores_KRT


def _blocks(seen: KeysSeen, device: torch.device) -> Iterator[_Block]:
    first_Q, last_Q = seen.first_Q, seen.last_Q
    there_Q = placed(first_Q, device), placed(last_Q, device)
    for start in range(0, len(first_Q), _QUERY_BLOCK):
        rows = slice(start, min(start + _QUERY_BLOCK, len(first_Q)))
        low, high = int(first_Q[start]), int(last_Q[rows.stop - 1])
        if low < high:
            first_R1, last_R1 = (x_Q[rows, None] - low for x_Q in there_Q)
            # ends neither fall, so the last query begins last and the first one ends first
            oldest, newest = int(first_Q[rows.stop - 1]), int(last_Q[start])
            all_see = slice(min(oldest, high) - low, max(newest, low) - low)
            yield _Block(rows, slice(low, high), first_R1, last_R1, all_see)


def _by_group(x_QHC: Tensor, num_groups: int) -> Tensor:
    """[K, R, C]: the rows R of a key/value head are its query heads times Q."""
    x_QKGC = x_QHC.unflatten(1, (num_groups, -1))
    return x_QKGC.permute(1, 2, 0, 3).flatten(1, 2)


def _by_row(x_KRC: Tensor, block: _Block) -> Tensor:
    """Inverse of `_by_group`, [Q, H, C]."""
    x_KGQC = x_KRC.unflatten(1, (-1, block.rows.stop - block.rows.start))
    return x_KGQC.permute(2, 0, 1, 3).flatten(1, 2)
