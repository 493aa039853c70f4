"""Exchanges of activations over a model axis, each with its dual as gradient.

| function         | forward                   | backward                  | in the papers   |
|------------------|---------------------------|---------------------------|-----------------|
| `enter`          | as it is                  | sum over ranks            | f               |
| `leave`          | sum over ranks            | as it is                  | f-bar           |
| `gather_tokens`  | whole tokens from parts   | sum, each rank its part   | g               |
| `scatter_tokens` | sum, each rank its part   | whole tokens from parts   | g-bar           |
| `join_tokens`    | whole tokens from parts   | each rank its part        |                 |
| `join_columns`   | whole last dim from parts | each rank its part        | gather (region) |

What follows a `join` must be computed equally by all ranks.

Collectives go through the process group eagerly, so that they are logged where all others are.

Source: Shoeybi et al., arXiv 1909.08053, section 3; Korthikanti et al., arXiv 2205.05198, section
4.2.2. Legend: S tokens, T a rank's part of them, D model, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def enter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x`, equal on all ranks; its gradient is summed over them."""
    return _Enter.apply(x, group)


def leave(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of `x` over the ranks, in place; the gradient is each rank's, unchanged."""
    return _Leave.apply(x, group)


def gather_tokens(x_TD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' tokens, [S, D]; the gradient is summed, and each rank keeps its tokens."""
    return _GatherTokens.apply(x_TD, group)


def scatter_tokens(x_SD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's tokens of the sum over ranks, [T, D]; S must be a multiple of the ranks."""
    return _ScatterTokens.apply(x_SD, group)


def join_tokens(x_TD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' tokens, [S, D]; each rank keeps the gradient of its own."""
    return _JoinTokens.apply(x_TD, group)


def join_columns(x_Sv: Tensor, group: dist.ProcessGroup, sizes: tuple[int, ...]) -> Tensor:
    """All ranks' columns side by side, [S, V]; `sizes`: of each rank, the first the longest."""
    return _JoinColumns.apply(x_Sv, group, sizes)


def _gathered(x_TD: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole_SD = x_TD.new_empty(x_TD.shape[0] * group.size(), *x_TD.shape[1:])
    dist.all_gather_single(whole_SD, x_TD.contiguous(), group=group)
    return whole_SD


def _scattered(x_SD: Tensor, group: dist.ProcessGroup) -> Tensor:
    assert x_SD.shape[0] % group.size() == 0, "rows are filled up to a multiple of the ranks"
    part_TD = x_SD.new_empty(x_SD.shape[0] // group.size(), *x_SD.shape[1:])
    dist.reduce_scatter_single(part_TD, x_SD.contiguous(), group=group)
    return part_TD


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        total = grad.clone(memory_format=torch.contiguous_format)  # others may hold `grad`
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, group):
        ctx.group = group
        return _gathered(x_TD, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SD):
        return _scattered(grad_SD, ctx.group), None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_SD, group):
        ctx.group = group
        return _scattered(x_SD, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TD):
        return _gathered(grad_TD, ctx.group), None


class _JoinTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, group):
        ctx.group = group
        return _gathered(x_TD, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SD):
        return grad_SD.chunk(ctx.group.size())[ctx.group.rank()], None


class _JoinColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_Sv, group, sizes):
        ctx.first, ctx.size = sum(sizes[: group.rank()]), sizes[group.rank()]
        padded_vS = x_Sv.new_zeros(sizes[0], x_Sv.shape[0])
        padded_vS[: ctx.size] = x_Sv.t()
        parts = _gathered(padded_vS, group).split(sizes[0])
        return torch.cat([part[:size] for part, size in zip(parts, sizes)]).t()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SV):
        return grad_SV[:, ctx.first : ctx.first + ctx.size], None, None
