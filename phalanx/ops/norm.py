"""Root-mean-square norm with weights stored around zero. Legend: S rows, D channels."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_SD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / rms(x) * (1 + w), computed in at least float32 and rounded once at the end.

    Args:
        x_SD: any leading dimensions; the last one is normalised.
        weight_D: w, so that zero is the identity scale (Gemma stores its norms so).
        eps: added to the mean square.
    """
    wide = torch.promote_types(x_SD.dtype, torch.float32)
    x = x_SD.to(wide)
    rms_S1 = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (x * rms_S1 * (1.0 + weight_D.to(wide))).to(x_SD.dtype)
