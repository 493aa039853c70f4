"""Exchanges of activations over a model axis, each with its conjugate as gradient.

| function         | forward                   | backward                  | in the papers   |
|------------------|---------------------------|---------------------------|-----------------|
| `enter`          | as it is                  | sum over ranks            | f               |
| `leave`          | sum over ranks            | as it is                  | f-bar           |
| `gather_tokens`  | whole tokens from parts   | sum, each rank its part   | g               |
| `scatter_tokens` | sum, each rank its part   | whole tokens from parts   | g-bar           |
| `join_tokens`    | whole tokens from parts   | each rank its part        |                 |
| `join_columns`   | whole last dim from parts | each rank its part        | gather (region) |

All but the last are rows of `CONJUGATES`: the backward pass of a pair is the pair turned round, so
they have derivatives of every order. What follows a `join` must be computed equally by all ranks.

Collectives go through the process group eagerly, so that they are logged where all others are.

Source: Shoeybi et al., arXiv 1909.08053, section 3; Korthikanti et al., arXiv 2205.05198, section
4.2.2. Legend: S tokens, T a rank's part of them, D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Exchange = Callable[[Tensor, dist.ProcessGroup], Tensor]


def gathered(x_TD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Parts of all ranks one after another, [S, D]; no gradient."""
    whole_SD = x_TD.new_empty(x_TD.shape[0] * group.size(), *x_TD.shape[1:])
    dist.all_gather_single(whole_SD, x_TD.contiguous(), group=group)
    return whole_SD


def _scattered(x_SD: Tensor, group: dist.ProcessGroup) -> Tensor:
    assert x_SD.shape[0] % group.size() == 0, "rows are filled up to a multiple of the ranks"
    part_TD = x_SD.new_empty(x_SD.shape[0] // group.size(), *x_SD.shape[1:])
    dist.reduce_scatter_single(part_TD, x_SD.contiguous(), group=group)
    return part_TD


def _total(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)  # others may hold `x`
    dist.all_reduce(total, group=group)
    return total


def _same(x: Tensor, _group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _own(x_SD: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x_SD.chunk(group.size())[group.rank()]


class Pair(NamedTuple):
    """What an exchange does, and what it does to gradients."""

    forward: Exchange
    backward: Exchange

    @property
    def turned(self) -> Pair:
        """The exchange of gradients, with gradients of its own."""
        return Pair(self.backward, self.forward)


CONJUGATES = {
    "enter": Pair(_same, _total),
    "leave": Pair(_total, _same),
    "gather_tokens": Pair(gathered, _scattered),
    "scatter_tokens": Pair(_scattered, gathered),
    "join_tokens": Pair(gathered, _own),
}


def exchange(x: Tensor, name: str, group: dist.ProcessGroup) -> Tensor:
    """An exchange of `CONJUGATES` over the ranks of an axis."""
    return _Exchange.apply(x, CONJUGATES[name], group)


def enter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x`, equal on all ranks; its gradient is summed over them."""
    return exchange(x, "enter", group)


def leave(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of `x` over the ranks, in place; the gradient is each rank's, unchanged."""
    return _Leave.apply(x, group)


def gather_tokens(x_TD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' tokens, [S, D]; the gradient is summed, and each rank keeps its tokens."""
    return exchange(x_TD, "gather_tokens", group)


def scatter_tokens(x_SD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's tokens of the sum over ranks, [T, D]; S must be a multiple of the ranks."""
    return exchange(x_SD, "scatter_tokens", group)


def join_tokens(x_TD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' tokens, [S, D]; each rank keeps the gradient of its own."""
    return exchange(x_TD, "join_tokens", group)


def join_columns(x_Sv: Tensor, group: dist.ProcessGroup, sizes: tuple[int, ...]) -> Tensor:
    """All ranks' columns side by side, [S, V]; `sizes`: of each rank, the first the longest."""
    return _JoinColumns.apply(x_Sv, group, sizes)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, pair, group):
        ctx.pair, ctx.group = pair, group
        return pair.forward(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _Exchange.apply(grad, ctx.pair.turned, ctx.group), None, None


class _Leave(torch.autograd.Function):
    """`leave` in place: the sum takes no memory of its own."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.mark_dirty(x)
        ctx.group = group
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return _Exchange.apply(grad, CONJUGATES["leave"].turned, ctx.group), None


class _JoinColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_Sv, group, sizes):
        ctx.first, ctx.size = sum(sizes[: group.rank()]), sizes[group.rank()]
        padded_vS = x_Sv.new_zeros(sizes[0], x_Sv.shape[0])
        padded_vS[: ctx.size] = x_Sv.t()
        parts = gathered(padded_vS, group).split(sizes[0])
        return torch.cat([part[:size] for part, size in zip(parts, sizes)]).t()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SV):
        return grad_SV[:, ctx.first : ctx.first + ctx.size], None, None
