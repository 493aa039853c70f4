"""Attention while keys and values go round a ring of ranks, and its gradients.

Both directions overlap: the next keys and values are on their way while those that are here are
worked on; there are two buffers, so that nothing is written to while it is being sent.

Legend: c tokens of a rank, H query heads, K key/value heads, C channels per head.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.ops.partial_attention import partial_attention, partial_attention_backward
from phalanx.ops.partial_sum import add_partial_


class _Hop:
    """A tensor on its way to the next rank of a ring, and one that comes from the rank before."""

    def __init__(self, mine: Tensor, group: dist.ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        self._mine, self._arriving = mine, torch.empty_like(mine)
        sent = dist.P2POp(dist.isend, mine, group=group, group_peer=(rank + 1) % size)
        came = dist.P2POp(dist.irecv, self._arriving, group=group, group_peer=(rank - 1) % size)
        self._works = dist.batch_isend_irecv([sent, came])

    def arrived(self) -> Tensor:
        """What the rank before sent; what was sent may be written to again."""
        for work in self._works:
            work.wait()
        return self._arriving


class RingAttention(torch.autograd.Function):
    """forward(q, k, v, part, group, scale, window) -> out."""

    @staticmethod
    def forward(ctx, q_cHC, k_cKC, v_cKC, part, group, scale, window):
        size, rank = group.size(), group.rank()
        out_cHC = lse_cH = None
        kv = torch.stack([k_cKC, v_cKC])
        for step in range(size):
            hop = _Hop(kv, group) if step < size - 1 else None
            seen = part.keys_seen((rank - step) % size, window)
            if out_cHC is None:  # a query sees at least itself
                out_cHC, lse_cH = partial_attention(q_cHC, *kv, seen, scale=scale)
            elif seen.num_pairs:
                add_partial_(out_cHC, lse_cH, *partial_attention(q_cHC, *kv, seen, scale=scale))
            kv = kv if hop is None else hop.arrived()
        out_cHC = out_cHC.to(q_cHC.dtype)
        ctx.save_for_backward(q_cHC, k_cKC, v_cKC, out_cHC, lse_cH)
        ctx.options = (part, group, scale, window)
        return out_cHC

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_cHC):
        q_cHC, k_cKC, v_cKC, out_cHC, lse_cH = ctx.saved_tensors
        part, group, scale, window = ctx.options
        size, rank = group.size(), group.rank()
        grad_q_cHC = torch.zeros_like(q_cHC, dtype=lse_cH.dtype)
        kv, own, travelling = torch.stack([k_cKC, v_cKC]), None, None
        for step in range(size):
            hop = _Hop(kv, group) if step < size - 1 else None
            seen = part.keys_seen((rank - step) % size, window)
            grad_kv = torch.zeros_like(kv, dtype=lse_cH.dtype)
            if seen.num_pairs:
                more = partial_attention_backward(
                    grad_cHC, q_cHC, *kv, out_cHC, lse_cH, seen, scale=scale
                )
                grad_q_cHC += more[0]
                grad_kv = torch.stack(more[1:])
            if step == 0:
                own = grad_kv
            else:  # the rank before saw these keys one step ago
                grad_kv = grad_kv if travelling is None else grad_kv.add_(travelling.arrived())
                travelling = _Hop(grad_kv, group)
            kv = kv if hop is None else hop.arrived()
        total = own if travelling is None else own.add_(travelling.arrived())
        return grad_q_cHC.to(q_cHC.dtype), *total.to(k_cKC.dtype), None, None, None, None
