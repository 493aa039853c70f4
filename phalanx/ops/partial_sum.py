"""Two partial results of attention as one; they must not count a key twice.

Legend: Q query rows, H query heads, C channels per head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_partial_(
    out_QHC: Tensor, lse_QH: Tensor, more_QHC: Tensor, more_lse_QH: Tensor
) -> tuple[Tensor, Tensor]:
    """(out, lse) over both sets of keys, written into the first two."""
    peak_QH = finite(torch.maximum(lse_QH, more_lse_QH))
    share_QH, more_share_QH = (lse_QH - peak_QH).exp_(), (more_lse_QH - peak_QH).exp_()
    sum_QH = share_QH + more_share_QH
    lse_QH.copy_(peak_QH + sum_QH.log())
    sum_QH.clamp_min_(1e-30)  # of a query that has seen nothing yet
    out_QHC.mul_((share_QH / sum_QH).unsqueeze(-1))
    out_QHC.addcmul_(more_QHC, (more_share_QH / sum_QH).unsqueeze(-1))
    return out_QHC, lse_QH


def finite(x: Tensor) -> Tensor:
    """0 in place of -inf: e^(-inf - 0) is the weight 0 that e^(-inf + inf) would not be."""
    return x.masked_fill(x == -torch.inf, 0.0)
