"""Rotary position embedding. Legend: S rows, H heads, C channels per head."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_table(
    positions_S: Tensor, head_dim: int, theta: float, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """cos and sin of every position and frequency, float32 [S, 1, C / 2] each.

    Frequency i of C / 2 is theta ** (-2 i / C) / factor.
    """
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_S.device)
    frequency = 1.0 / (theta ** (steps / head_dim)) / factor
    angle_S1C = positions_S.to(torch.float32)[:, None, None] * frequency
    return angle_S1C.cos(), angle_S1C.sin()


def rotate(x_SHC: Tensor, cos_S1C: Tensor, sin_S1C: Tensor) -> Tensor:
    """x rotated by position: channel i is paired with channel i + C / 2 (Hugging Face's pairing).

    Source: Su et al., RoFormer, arXiv 2104.09864, section 3.2.2; pairing of halves as in GPT-NeoX.
    """
    first, second = x_SHC.chunk(2, -1)
    out_SHC = torch.empty_like(x_SHC)
    out_first, out_second = out_SHC.chunk(2, -1)
    torch.mul(first, cos_S1C, out=out_first).addcmul_(second, sin_S1C, value=-1.0)
    torch.mul(second, cos_S1C, out=out_second).addcmul_(first, sin_S1C)
    return out_SHC
