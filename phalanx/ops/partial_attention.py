"""Attention of some queries on some keys, with what it takes to add other keys later.

What a query has seen so far is (out, lse): the softmax-weighted mean of the values and the
logarithm of the sum of the exponentiated scores. A query that saw nothing has out 0 and lse -inf,
so that adding it changes nothing (torch's own CPU kernel says lse 0 there, which would). Partial
results and gradients are float32 where inputs have 16 bits: rounding them at every hop adds up.

Which keys a query sees: `layout.token_layout.KeysSeen`. One signature, four ways to compute it:
compiled attention (bfloat16 on CPUs), torch's flash kernels on CUDA and on CPUs where the stretches
of queries make few calls, and blocks of queries in plain operators for all else.

Legend: Q query rows, T key rows, H query heads, K key/value heads, C channels per head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.layout.token_layout import KeysSeen
from phalanx.ops import native
from phalanx.ops.partial_blocks import blocked_backward, blocked_forward
from phalanx.ops.partial_cuda import cuda_backward, cuda_forward, serves_cuda
from phalanx.ops.partial_flash import flash_backward, flash_forward, runs_of, serves_flash
from phalanx.ops.partial_sum import add_partial_


def partial_attention(
    q_QHC: Tensor, k_TKC: Tensor, v_TKC: Tensor, seen: KeysSeen, *, scale: float
) -> tuple[Tensor, Tensor]:
    """(out [Q, H, C], lse [Q, H]) over these keys only, at least float32."""
    inputs = (q_QHC, k_TKC, v_TKC)
    if native.serves_partial(*inputs):
        return _compiled_forward(*inputs, seen, scale)
    if (runs := runs_of(seen)) is not None:
        if serves_cuda(*inputs):
            return cuda_forward(*inputs, seen, scale)
        if serves_flash(q_QHC, runs):
            return flash_forward(*inputs, runs, scale)
    return blocked_forward(*inputs, seen, scale)


def partial_attention_backward(
    grad_QHC: Tensor,
    q_QHC: Tensor,
    k_TKC: Tensor,
    v_TKC: Tensor,
    out_QHC: Tensor,
    lse_QH: Tensor,
    seen: KeysSeen,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys add to the gradients of q, and the gradients of k and v by these queries.

    Args:
        out_QHC, lse_QH: over all keys, not only these.

    Returns:
        gradients of q, k and v, at least float32. They are exact parts: over all keys they sum to
        the gradient of q, over all queries to those of k and v.
    """
    inputs = (grad_QHC, q_QHC, k_TKC, v_TKC)
    if native.serves_partial(*inputs[1:]):
        return _compiled_backward(*inputs, out_QHC, lse_QH, seen, scale)
    if (runs := runs_of(seen)) is not None:
        if serves_cuda(*inputs[1:]):
            return cuda_backward(*inputs, out_QHC, lse_QH, seen, scale)
        if serves_flash(q_QHC, runs):
            return flash_backward(*inputs, out_QHC, lse_QH, runs, scale)
    slope_QH = _slope(grad_QHC, out_QHC)
    return blocked_backward(*inputs, lse_QH, slope_QH, seen, scale)


def _slope(grad_QHC: Tensor, out_QHC: Tensor) -> Tensor:
    """Sum over channels of gradient times output, [Q, H]: what softmax takes off every score."""
    wide = torch.promote_types(grad_QHC.dtype, torch.float32)
    return (grad_QHC.to(wide) * out_QHC.to(wide)).sum(-1)


def _compiled_forward(
    q_QHC: Tensor, k_TKC: Tensor, v_TKC: Tensor, seen: KeysSeen, scale: float
) -> tuple[Tensor, Tensor]:
    so_far = None
    for keys, stretch in _stretches(seen):
        part = native.partial_forward(q_QHC, k_TKC[keys], v_TKC[keys], *_ends(stretch), scale)
        so_far = part if so_far is None else add_partial_(*so_far, *part)
    assert so_far is not None, "there are no keys"
    return so_far


def _compiled_backward(
    grad_QHC: Tensor,
    q_QHC: Tensor,
    k_TKC: Tensor,
    v_TKC: Tensor,
    out_QHC: Tensor,
    lse_QH: Tensor,
    seen: KeysSeen,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads: list[list[Tensor]] = [[], [], []]
    whole = lse_QH, _slope(grad_QHC, out_QHC)
    for keys, stretch in _stretches(seen):
        inputs = (grad_QHC.to(q_QHC.dtype), q_QHC, k_TKC[keys], v_TKC[keys])
        parts = native.partial_backward(*inputs, *whole, *_ends(stretch), scale)
        for of_one, part in zip(grads, parts):
            of_one.append(part)
    grads_q, grads_k, grads_v = grads
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
