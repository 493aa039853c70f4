"""Exchange of tokens for heads between ranks, each the other's gradient.

Legend: S tokens of the group, c tokens of a rank, h heads of all ranks, N ranks, C channels.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def to_heads(x_chC: Tensor, order_S: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All tokens of this rank's heads, [S, h / N, C].

    Args:
        order_S: what sorts the tokens of all ranks, one rank's behind the other's.
    """
    return _ToHeads.apply(x_chC, order_S, group)


def to_tokens(x_ShC: Tensor, order_S: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The way back: this rank's tokens of all heads, [c, h, C]."""
    return _ToTokens.apply(x_ShC, order_S, group)


def _heads(x_chC: Tensor, order_S: Tensor, group: dist.ProcessGroup) -> Tensor:
    mine = x_chC.unflatten(1, (group.size(), -1)).transpose(0, 1).contiguous()
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    return theirs.flatten(0, 1)[order_S]


def _tokens(x_ShC: Tensor, order_S: Tensor, group: dist.ProcessGroup) -> Tensor:
    mine = torch.empty_like(x_ShC, memory_format=torch.contiguous_format)
    mine[order_S] = x_ShC
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    return theirs.unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(1, 2)


class _ToHeads(torch.autograd.Function):
    """Some tokens of all heads to all tokens, in order, of some heads: [c, h, C] -> [S, h/N, C]."""

    @staticmethod
    def forward(ctx, x_chC, order_S, group):
        ctx.order_S, ctx.group = order_S, group
        return _heads(x_chC, order_S, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_ShC):
        return _tokens(grad_ShC, ctx.order_S, ctx.group), None, None


class _ToTokens(torch.autograd.Function):
    """The way back: [S, h/N, C] -> [c, h, C]."""

    @staticmethod
    def forward(ctx, x_ShC, order_S, group):
        ctx.order_S, ctx.group = order_S, group
        return _tokens(x_ShC, order_S, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_chC):
        return _heads(grad_chC, ctx.order_S, ctx.group), None, None
