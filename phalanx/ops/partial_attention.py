"""Attention of some queries on some keys, with what it takes to add other keys later.

What a query has seen so far is (out, lse): the softmax-weighted mean of the values and the
logarithm of the sum of the exponentiated scores. A query that saw nothing has out 0 and lse -inf,
so that adding it changes nothing (torch's own CPU kernel says lse 0 there, which would). Partial
results and gradients are float32 where inputs have 16 bits: rounding them at every hop adds up.

Which keys a query sees: `layout.token_layout.KeysSeen`.

Legend: Q query rows, T key rows, H query heads, K key/value heads, C channels per head; within a
block R rows of a key/value head, which are its query heads times queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.layout.token_layout import KeysSeen
from phalanx.ops import native

_QUERY_BLOCK = 128  # a block's scores stay in cache


def partial_attention(
    q_QHC: Tensor, k_TKC: Tensor, v_TKC: Tensor, seen: KeysSeen, *, scale: float
) -> tuple[Tensor, Tensor]:
    """(out [Q, H, C], lse [Q, H]) over these keys only, at least float32."""
    if not native.serves_partial(q_QHC, k_TKC, v_TKC):
        return _plain_forward(q_QHC, k_TKC, v_TKC, seen, scale)
    so_far = None
    for keys, stretch in _stretches(seen):
        ends = _ends(stretch)
        part = native.partial_forward(q_QHC, k_TKC[keys], v_TKC[keys], *ends, scale)
        so_far = part if so_far is None else add_partial_(*so_far, *part)
    assert so_far is not None, "there are no keys"
    return so_far


def _plain_forward(
    q_QHC: Tensor, k_TKC: Tensor, v_TKC: Tensor, seen: KeysSeen, scale: float
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q_QHC.dtype, torch.float32)
    out_QHC = q_QHC.new_zeros(q_QHC.shape, dtype=wide)
    lse_QH = q_QHC.new_full(q_QHC.shape[:2], -torch.inf, dtype=wide)
    k_KCT, v_KTC = k_TKC.to(wide).permute(1, 2, 0), v_TKC.to(wide).transpose(0, 1)
    for block in _blocks(seen, q_QHC.device):
        q_KRC = _by_group(q_QHC[block.rows].to(wide) * scale, k_TKC.shape[1])
        scores_KRT = block.mask_(torch.bmm(q_KRC, k_KCT[..., block.keys]))
        peak_KR1 = _finite(scores_KRT.amax(-1, keepdim=True))
        weights_KRT = scores_KRT.sub_(peak_KR1).exp_()
        sum_KR1 = weights_KRT.sum(-1, keepdim=True)
        mean_KRC = torch.bmm(weights_KRT, v_KTC[:, block.keys]) / sum_KR1.clamp_min(1e-30)
        out_QHC[block.rows] = _by_row(mean_KRC, block)
        lse_QH[block.rows] = _by_row(peak_KR1 + sum_KR1.log(), block).squeeze(-1)
    return out_QHC, lse_QH


def partial_attention_backward(
    grad_QHC: Tensor,
    q_QHC: Tensor,
    k_TKC: Tensor,
    v_TKC: Tensor,
    lse_QH: Tensor,
    delta_QH: Tensor,
    seen: KeysSeen,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys add to the gradients of q, and the gradients of k and v by these queries.

    Args:
        lse_QH: over all keys, not only these.
        delta_QH: `output_slope` of the whole output.

    Returns:
        gradients of q, k and v, at least float32. They are exact parts: over all keys they sum to
        the gradient of q, over all queries to those of k and v.
    """
    if not native.serves_partial(q_QHC, k_TKC, v_TKC) or grad_QHC.dtype != q_QHC.dtype:
        return _plain_backward(grad_QHC, q_QHC, k_TKC, v_TKC, lse_QH, delta_QH, seen, scale)
    grads_q, grads_k, grads_v = [], [], []
    for keys, stretch in _stretches(seen):
        inputs = (grad_QHC, q_QHC, k_TKC[keys], v_TKC[keys], lse_QH, delta_QH)
        parts = native.partial_backward(*inputs, *_ends(stretch), scale)
        for grads, part in zip((grads_q, grads_k, grads_v), parts):
            grads.append(part)
    return sum(grads_q[1:], start=grads_q[0]), _joined(grads_k), _joined(grads_v)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _stretches(seen: KeysSeen) -> Iterator[tuple[slice, KeysSeen]]:
    """The keys in pieces that compiled attention takes."""
    for start in range(0, seen.num_keys, native.MOST_KEYS):
        stop = min(start + native.MOST_KEYS, seen.num_keys)
        yield slice(start, stop), seen.within(start, stop)


def _ends(seen: KeysSeen) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(seen.first_Q), torch.from_numpy(seen.last_Q)


def _plain_backward(
    grad_QHC: Tensor,
    q_QHC: Tensor,
    k_TKC: Tensor,
    v_TKC: Tensor,
    lse_QH: Tensor,
    delta_QH: Tensor,
    seen: KeysSeen,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(q_QHC.dtype, torch.float32)
    grad_q_QHC = q_QHC.new_zeros(q_QHC.shape, dtype=wide)
    k_KTC, v_KTC = (x.to(wide).transpose(0, 1) for x in (k_TKC, v_TKC))
    grad_k_KTC, grad_v_KTC = torch.zeros_like(k_KTC), torch.zeros_like(v_KTC)
    num_groups = k_TKC.shape[1]
    lse_QH = _finite(lse_QH)
    for block in _blocks(seen, q_QHC.device):
        rows, keys = block.rows, block.keys
        q_KRC = _by_group(q_QHC[rows].to(wide) * scale, num_groups)
        grad_KRC = _by_group(grad_QHC[rows].to(wide), num_groups)
        lse_KR1, delta_KR1 = (
            _by_group(x_QH[rows].unsqueeze(-1), num_groups) for x_QH in (lse_QH, delta_QH)
        )
        scores_KRT = block.mask_(torch.bmm(q_KRC, k_KTC[:, keys].mT))
        p_KRT = scores_KRT.sub_(lse_KR1).exp_()
        grad_v_KTC[:, keys] += p_KRT.mT @ grad_KRC
        grad_s_KRT = (grad_KRC @ v_KTC[:, keys].mT).sub_(delta_KR1).mul_(p_KRT)
        grad_q_QHC[rows] = _by_row(grad_s_KRT @ k_KTC[:, keys], block)
        grad_k_KTC[:, keys] += grad_s_KRT.mT @ q_KRC
    return grad_q_QHC.mul_(scale), grad_k_KTC.transpose(0, 1), grad_v_KTC.transpose(0, 1)


def output_slope(grad_QHC: Tensor, out_QHC: Tensor) -> Tensor:
    """Sum over channels of gradient times output, [Q, H]: what softmax takes off every score."""
    wide = torch.promote_types(grad_QHC.dtype, torch.float32)
    return (grad_QHC.to(wide) * out_QHC.to(wide)).sum(-1)


def add_partial_(
    out_QHC: Tensor, lse_QH: Tensor, more_QHC: Tensor, more_lse_QH: Tensor
) -> tuple[Tensor, Tensor]:
    """Both partial results as one, in the first two; keys must not be counted twice."""
    peak_QH = _finite(torch.maximum(lse_QH, more_lse_QH))
    share_QH, more_share_QH = (lse_QH - peak_QH).exp_(), (more_lse_QH - peak_QH).exp_()
    sum_QH = share_QH + more_share_QH
    lse_QH.copy_(peak_QH + sum_QH.log())
    sum_QH.clamp_min_(1e-30)  # of a query that has seen nothing yet
    out_QHC.mul_((share_QH / sum_QH).unsqueeze(-1))
    out_QHC.addcmul_(more_QHC, (more_share_QH / sum_QH).unsqueeze(-1))
    return out_QHC, lse_QH


def _finite(x: Tensor) -> Tensor:
    """0 in place of -inf: e^(-inf - 0) is the weight 0 that e^(-inf + inf) would not be."""
    return x.masked_fill(x == -torch.inf, 0.0)


@dataclass(frozen=True)
class _Block:
    """Queries and the keys that any of them sees.

    Attributes:
        first_R1, last_R1: of each query, counted within `keys`.
    """

    rows: slice
    keys: slice
    first_R1: Tensor
    last_R1: Tensor

    def mask_(self, scores_KRT: Tensor) -> Tensor:
        """Set what a query does not see to -inf, in place."""
        per_query = scores_KRT.unflatten(1, (-1, len(self.first_R1)))
        num_keys = scores_KRT.shape[-1]
        first, last = int(self.first_R1.max()), int(self.last_R1.min())
        for start, end in ((0, min(first, num_keys)), (max(last, 0), num_keys)):
            key_T = torch.arange(start, end, device=scores_KRT.device)
            unseen = (key_T < self.first_R1) | (key_T >= self.last_R1)
            per_query[..., start:end].masked_fill_(unseen, -torch.inf)
        return scores_KRT


def _blocks(seen: KeysSeen, device: torch.device) -> Iterator[_Block]:
    first_Q, last_Q = _ends(seen)
    for start in range(0, len(first_Q), _QUERY_BLOCK):
        rows = slice(start, min(start + _QUERY_BLOCK, len(first_Q)))
        low, high = int(first_Q[start]), int(last_Q[rows.stop - 1])
        if low < high:
            first_R1, last_R1 = ((x[rows, None] - low).to(device) for x in (first_Q, last_Q))
            yield _Block(rows, slice(low, high), first_R1, last_R1)


def _by_group(x_QHC: Tensor, num_groups: int) -> Tensor:
    """[K, R, C]: the rows R of a key/value head are its query heads times Q."""
    x_QKGC = x_QHC.unflatten(1, (num_groups, -1))
    return x_QKGC.permute(1, 2, 0, 3).flatten(1, 2)


def _by_row(x_KRC: Tensor, block: _Block) -> Tensor:
    """Inverse of `_by_group`, [Q, H, C]."""
    x_KGQC = x_KRC.unflatten(1, (-1, block.rows.stop - block.rows.start))
    return x_KGQC.permute(2, 0, 1, 3).flatten(1, 2)
