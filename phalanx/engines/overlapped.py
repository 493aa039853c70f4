"""A block's backward exchange beside the gradients of its weights.

The backward pass of column products computes the gradient of their input, which all ranks must sum,
and those of their weights, which nobody waits for. Here the sum is started first:

    forward:   wait   weight (per product)   enter   product (per product)
    backward:  product: gradient of the input; enter: start the sum; weight: its gradient; wait

Autograd runs what is ready in the reverse order of the forward calls, so making the four kinds of
nodes in this order is all that it takes. Values are those of the plain form.

Source: Korthikanti et al., arXiv 2205.05198, section 4.2.2. Difference: the second gather of the
block's input, where there is one, is not overlapped.

Legend: S tokens, I inputs, o a rank's outputs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.ops.tensor_exchange import gathered


class Later:
    """What a product's backward pass leaves for the gradient of its weight."""

    def __init__(self) -> None:
        self.x_SI: Tensor | None = None
        self.grad_So: Tensor | None = None


class Started:
    """An exchange that is under way."""

    def __init__(self, group: dist.ProcessGroup, splits_tokens: bool) -> None:
        self.group, self.splits_tokens = group, splits_tokens
        self.work: dist.Work | None = None


def wait_behind(x: Tensor, started: Started) -> Tensor:
    """`x`; its gradient is there when the exchange is over. Before all else of the block."""
    return _Wait.apply(x, started)


def enter_started(x: Tensor, started: Started) -> Tensor:
    """The block's input, whole on every rank; the sum of its gradient is started only."""
    return _Enter.apply(x, started)


def weight_later(weight_oI: Tensor, later: Later) -> Tensor:
    """`weight_oI`; its gradient is computed from what the product has left."""
    return _Weight.apply(weight_oI, later)


def product(x_SI: Tensor, weight_oI: Tensor, later: Later) -> Tensor:
    """x W^T, [S, o], with a weight from `weight_later`."""
    return _Product.apply(x_SI, weight_oI, later)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, started):
        ctx.started = started
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        ctx.started.work.wait()
        ctx.started.work = None
        return grad, None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, started):
        ctx.started = started
        return gathered(x, started.group) if started.splits_tokens else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        started = ctx.started
        # a buffer of its own: others may hold `grad`
        whole = grad.clone(memory_format=torch.contiguous_format)
        if not started.splits_tokens:
            started.work = dist.all_reduce(whole, group=started.group, async_op=True)
            return whole, None
        part = whole.new_empty(whole.shape[0] // started.group.size(), *whole.shape[1:])
        started.work = dist.reduce_scatter_single(part, whole, group=started.group, async_op=True)
        return part, None


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight_oI, later):
        ctx.later = later
        return weight_oI.view_as(weight_oI)

    @staticmethod
    @once_differentiable
    def backward(ctx, _nothing):
        later = ctx.later
        grad_oI = later.grad_So.t() @ later.x_SI
        later.grad_So = later.x_SI = None
        return grad_oI, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_SI, weight_oI, later):
        ctx.save_for_backward(x_SI, weight_oI)
        ctx.later = later
        return torch.nn.functional.linear(x_SI, weight_oI)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_So):
        x_SI, weight_oI = ctx.saved_tensors
        ctx.later.x_SI, ctx.later.grad_So = x_SI, grad_So
        nothing = weight_oI.new_zeros(()).expand(weight_oI.shape)  # takes no memory
        return grad_So @ weight_oI, nothing, None
