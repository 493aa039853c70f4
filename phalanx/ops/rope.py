"""Rotary position embedding. Legend: S rows, H heads, C channels per head, c = C / 2."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_table(
    positions_S: Tensor, head_dim: int, theta: float, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """cos and sin of every position and frequency, float32 [S, 1, c] each.

    Frequency i of c is theta ** (-2 i / C) / factor.
    """
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_S.device)
    frequency = 1.0 / (theta ** (steps / head_dim)) / factor
    angle_S1c = positions_S.to(torch.float32)[:, None, None] * frequency
    return angle_S1c.cos(), angle_S1c.sin()


def rotate(x_SHC: Tensor, cos_S1c: Tensor, sin_S1c: Tensor) -> Tensor:
    """x rotated by position: channel i is paired with channel i + C / 2 (Hugging Face's pairing).

    Source: Su et al., RoFormer, arXiv 2104.09864, section 3.2.2; pairing of halves as in GPT-NeoX.
    """
    x_SH2c = x_SHC.unflatten(-1, (2, -1))
    out_SH2c = x_SH2c * cos_S1c.unsqueeze(-2)
    out_SH2c[..., 0, :].addcmul_(x_SH2c[..., 1, :], sin_S1c, value=-1.0)
    out_SH2c[..., 1, :].addcmul_(x_SH2c[..., 0, :], sin_S1c)
    return out_SH2c.flatten(-2)
