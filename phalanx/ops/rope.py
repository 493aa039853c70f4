"""Rotary position embedding. Legend: S rows, H heads, C channels per head, c = C / 2."""

from __future__ import annotations

from math import tau

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rope_table(
    positions_S: Tensor,
    head_dim: int,
    theta: float,
    factor: float = 1.0,
    *,
    bands: tuple[float, float, int] | None = None,
    rotated_frac: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """cos and sin of every position and frequency, float32 [S, 1, c] each.

    Frequency i of c is theta ** (-2 i / C) / factor.

    Args:
        bands: (low factor l, high factor h, positions P): the factor touches waves longer than
            P / l, not those shorter than P / h; between them frequencies are blended (Llama 3.1).
        rotated_frac: frequencies beyond this share of them are 0 (Gemma 4's full layers).
    """
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_S.device)
    frequency_c = 1.0 / (theta ** (steps / head_dim))
    if bands is None:
        frequency_c = frequency_c / factor
    else:
        frequency_c = _banded(frequency_c, factor, *bands)
    if rotated_frac != 1.0:
        frequency_c[int(rotated_frac * head_dim // 2) :] = 0.0
    angle_S1c = positions_S.to(torch.float32)[:, None, None] * frequency_c
    return angle_S1c.cos(), angle_S1c.sin()


def _banded(frequency_c: Tensor, factor: float, low: float, high: float, positions: int) -> Tensor:
    waves_c = positions * frequency_c / tau  # in the original context
    kept_c = ((waves_c - low) / (high - low)).clamp(0.0, 1.0)
    return frequency_c * (kept_c + (1.0 - kept_c) / factor)


def rotate(x_SHC: Tensor, cos_S1c: Tensor, sin_S1c: Tensor) -> Tensor:
    """x rotated by position: channel i is paired with channel i + C / 2 (Hugging Face's pairing).

    Source: Su et al., RoFormer, arXiv 2104.09864, section 3.2.2; pairing of halves as in GPT-NeoX.
    """
    x_SH2c = x_SHC.unflatten(-1, (2, -1))
    out_SH2c = x_SH2c * cos_S1c.unsqueeze(-2)
    out_SH2c[..., 0, :].addcmul_(x_SH2c[..., 1, :], sin_S1c, value=-1.0)
    out_SH2c[..., 1, :].addcmul_(x_SH2c[..., 0, :], sin_S1c)
    return out_SH2c.flatten(-2)


def rotate_rows(x_SHC: Tensor, cos_S1c: Tensor, sin_S1c: Tensor) -> Tensor:
    """`rotate` in at least float32, rounded once; only the tables are kept for the backward pass.

    No second derivative.
    """
    return _Rotate.apply(x_SHC, cos_S1c, sin_S1c)


class _Rotate(torch.autograd.Function):
    """forward(x, cos, sin); the gradient is rotated back."""

    @staticmethod
    def forward(ctx, x_SHC, cos, sin):
        ctx.save_for_backward(cos, sin)
        wide = torch.promote_types(x_SHC.dtype, torch.float32)
        return rotate(x_SHC.to(wide), cos, sin).to(x_SHC.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SHC):
        cos, sin = ctx.saved_tensors
        wide = torch.promote_types(grad_SHC.dtype, torch.float32)
        return rotate(grad_SHC.to(wide), cos, -sin).to(grad_SHC.dtype), None, None
