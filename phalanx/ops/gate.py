"""The gate of a feed-forward block: activation(gate) * up.

Legend: S rows, F channels of the block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.errors import JobError, nearest_names
from phalanx.ops import native

ACTIVATIONS = ("gelu_tanh", "silu")


def gated_product(gate_SF: Tensor, up_SF: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, each rounded to the dtype of the inputs, same shape.

    Only the two inputs are kept for the backward pass, which computes the activation again; torch's
    own chain of two operators keeps it too. No second derivative.

    Args:
        activation: "gelu_tanh" (Hendrycks and Gimpel, arXiv 1606.08415, section 2) or "silu".

    Raises:
        JobError: `model/unknown` for another activation.
    """
    if activation not in ACTIVATIONS:
        rule, legal = "is no activation of a gate", nearest_names(activation, ACTIVATIONS)
        raise JobError("model/unknown", "activation", activation, rule, legal=legal)
    return _GatedProduct.apply(gate_SF, up_SF, activation)


def _activated(gate_SF: Tensor, activation: str) -> Tensor:
    if activation == "gelu_tanh":
        return F.gelu(gate_SF, approximate="tanh")
    return F.silu(gate_SF)


class _GatedProduct(torch.autograd.Function):
    """forward(gate [S, F], up [S, F], activation) -> [S, F]."""

    @staticmethod
    def forward(ctx, gate_SF, up_SF, activation):
        ctx.save_for_backward(gate_SF, up_SF)
        ctx.activation = activation
        if native.serves(gate_SF, up_SF):
            return native.gate_forward(gate_SF, up_SF, activation)
        return _activated(gate_SF, activation).mul_(up_SF)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SF):
        gate_SF, up_SF = ctx.saved_tensors
        if native.serves(grad_SF, gate_SF, up_SF):
            return *native.gate_backward(grad_SF, gate_SF, up_SF, ctx.activation), None
        grad_gate_SF = grad_up_SF = None
        if ctx.needs_input_grad[1]:
            grad_up_SF = _activated(gate_SF, ctx.activation).mul_(grad_SF)
        if ctx.needs_input_grad[0]:
            grad_act_SF = grad_SF * up_SF
            if ctx.activation == "gelu_tanh":
                grad_gate_SF = torch.ops.aten.gelu_backward(
                    grad_act_SF, gate_SF, approximate="tanh"
                )
            else:
                grad_gate_SF = torch.ops.aten.silu_backward(grad_act_SF, gate_SF)
        return grad_gate_SF, grad_up_SF, None
