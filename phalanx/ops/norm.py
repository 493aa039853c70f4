"""Root-mean-square norm, alone or followed by a rotation.

Legend: S rows (any leading dimensions), D channels, H heads of C channels, c = C / 2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.ops import native
from phalanx.ops.rope import rotate


def rms_norm(x_SD: Tensor, weight_D: Tensor | None, eps: float, offset: float = 1.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + w), in at least float32, rounded once at the end.

    Only x and one number per row are kept for the backward pass. No second derivative.

    Args:
        x_SD: the last dimension is normalised.
        weight_D: w; None: no scale at all.
        eps: added to the mean square.
        offset: 1 for weights stored around zero (Gemma up to 3), 0 for plain ones.
    """
    return _RmsNorm.apply(x_SD, weight_D, eps, None, None, offset)


def rms_norm_rotate(
    x_SHC: Tensor,
    weight_C: Tensor | None,
    eps: float,
    cos_S1c: Tensor,
    sin_S1c: Tensor,
    offset: float = 1.0,
) -> Tensor:
    """`rope.rotate(rms_norm(x), cos, sin)` without rounding in between."""
    return _RmsNorm.apply(x_SHC, weight_C, eps, cos_S1c, sin_S1c, offset)


class _RmsNorm(torch.autograd.Function):
    """forward(x, w | None, eps, cos | None, sin | None, offset)."""

    @staticmethod
    def forward(ctx, x_SD, weight_D, eps, cos, sin, offset):
        ctx.offset = offset
        if native.serves(x_SD):
            scale_D = _scale_or_ones(x_SD, weight_D, offset)
            out_SD, inverse_S1 = native.norm_forward(x_SD, scale_D, eps, cos, sin)
            ctx.save_for_backward(x_SD, weight_D, inverse_S1, cos, sin)
            return out_SD
        wide = torch.promote_types(x_SD.dtype, torch.float32)
        x = x_SD.to(wide)
        num_channels = x.shape[-1]
        square_S1 = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        inverse_S1 = square_S1.div_(num_channels).add_(eps).rsqrt_()
        out = x * inverse_S1
        if weight_D is not None:
            out.mul_(_scale(weight_D, wide, offset))
        ctx.save_for_backward(x_SD, weight_D, inverse_S1, cos, sin)
        return (out if cos is None else rotate(out, cos, sin)).to(x_SD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SD):
        x_SD, weight_D, inverse_S1, cos, sin = ctx.saved_tensors
        needs_weight = ctx.needs_input_grad[1]
        if native.serves(grad_SD, x_SD):
            scale_D = _scale_or_ones(x_SD, weight_D, ctx.offset)
            grads = native.norm_backward(grad_SD, x_SD, scale_D, inverse_S1, cos, sin, needs_weight)
            grad_weight_D = grads[1].to(weight_D.dtype) if needs_weight else None
            return grads[0], grad_weight_D, None, None, None, None
        wide = inverse_S1.dtype
        x, grad = x_SD.to(wide), grad_SD.to(wide)
        if cos is not None:
            grad = rotate(grad, cos, -sin)
        grad_weight_D = None
        if needs_weight:
            rows = (grad * x).mul_(inverse_S1).flatten(0, -2)
            grad_weight_D = rows.sum(0).to(weight_D.dtype)
        scaled = grad.clone() if weight_D is None else grad * _scale(weight_D, wide, ctx.offset)
        along_S1 = (scaled * x).mean(-1, keepdim=True) * inverse_S1.pow(3)
        grad_x = scaled.mul_(inverse_S1).addcmul_(x, along_S1, value=-1.0)
        return grad_x.to(x_SD.dtype), grad_weight_D, None, None, None, None


def _scale(weight_D: Tensor, wide: torch.dtype, offset: float) -> Tensor:
    return weight_D.to(wide) + offset if offset else weight_D.to(wide)


def _scale_or_ones(x_SD: Tensor, weight_D: Tensor | None, offset: float) -> Tensor:
    """What the compiled form multiplies by, float32."""
    if weight_D is None:
        return x_SD.new_ones(x_SD.shape[-1], dtype=torch.float32)
    return _scale(weight_D, torch.float32, offset)
