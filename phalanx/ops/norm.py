"""Root-mean-square norm with weights stored around zero, alone or followed by a rotation.

Legend: S rows (any leading dimensions), D channels, H heads of C channels, c = C / 2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.ops.rope import rotate


def rms_norm(x_SD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (1 + w), in at least float32, rounded once at the end.

    Only x and one number per row are kept for the backward pass. No second derivative.

    Args:
        x_SD: the last dimension is normalised.
        weight_D: w; zero is the identity scale (Gemma stores its norms so).
        eps: added to the mean square.
    """
    return _RmsNorm.apply(x_SD, weight_D, eps, None, None)


def rms_norm_rotate(
    x_SHC: Tensor, weight_C: Tensor, eps: float, cos_S1c: Tensor, sin_S1c: Tensor
) -> Tensor:
    """`rope.rotate(rms_norm(x), cos, sin)` without rounding in between."""
    return _RmsNorm.apply(x_SHC, weight_C, eps, cos_S1c, sin_S1c)


class _RmsNorm(torch.autograd.Function):
    """forward(x, w, eps, cos | None, sin | None)."""

    @staticmethod
    def forward(ctx, x_SD, weight_D, eps, cos, sin):
        wide = torch.promote_types(x_SD.dtype, torch.float32)
        x = x_SD.to(wide)
        num_channels = x.shape[-1]
        square_S1 = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        inverse_S1 = square_S1.div_(num_channels).add_(eps).rsqrt_()
        out = (x * inverse_S1).mul_(1.0 + weight_D.to(wide))
        ctx.save_for_backward(x_SD, weight_D, inverse_S1, cos, sin)
        return (out if cos is None else rotate(out, cos, sin)).to(x_SD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SD):
        x_SD, weight_D, inverse_S1, cos, sin = ctx.saved_tensors
        wide = inverse_S1.dtype
        x, grad = x_SD.to(wide), grad_SD.to(wide)
        if cos is not None:
            grad = rotate(grad, cos, -sin)
        grad_weight_D = None
        if ctx.needs_input_grad[1]:
            rows = (grad * x).mul_(inverse_S1).flatten(0, -2)
            grad_weight_D = rows.sum(0).to(weight_D.dtype)
        scaled = grad * (1.0 + weight_D.to(wide))
        along_S1 = (scaled * x).mean(-1, keepdim=True) * inverse_S1.pow(3)
        grad_x = scaled.mul_(inverse_S1).addcmul_(x, along_S1, value=-1.0)
        return grad_x.to(x_SD.dtype), grad_weight_D, None, None, None
