"""Rotary position embedding. Legend: S rows, H heads, C channels per head."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_table(
    positions_S: Tensor, head_dim: int, theta: float, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin of every position and frequency, [S, 1, C / 2] each.

    Frequency i of C / 2 is theta ** (-2 i / C) / factor; the angle is computed in float32, as
    transformers does, whatever `dtype` is.
    """
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_S.device)
    frequency = 1.0 / (theta ** (steps / head_dim)) / factor
    angle_S1C = positions_S.to(torch.float32)[:, None, None] * frequency
    return angle_S1C.cos().to(dtype), angle_S1C.sin().to(dtype)


def rotate(x_SHC: Tensor, cos_S1C: Tensor, sin_S1C: Tensor) -> Tensor:
    """x rotated by position: channel i is paired with channel i + C / 2 (Hugging Face's pairing).

    Source: Su et al., RoFormer, arXiv 2104.09864, section 3.2.2; pairing of halves as in GPT-NeoX.
    """
    first, second = x_SHC.chunk(2, -1)
    return torch.cat(
        (first * cos_S1C - second * sin_S1C, second * cos_S1C + first * sin_S1C), -1
    ).to(x_SHC.dtype)
