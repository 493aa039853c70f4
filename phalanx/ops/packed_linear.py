"""Products of few rows with a matrix, limited by reading the matrix once.

Legend: S rows, D channels in, F channels out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.ops import native


def packed_linear(x_SD: Tensor, weight_FD: Tensor) -> Tensor:
    """x W^T [S, F]: summed in float32 and rounded once for bfloat16 on CPUs.

    The matrix stays as torch keeps it, so it can be updated in place and a tied embedding exists
    once; what is packed is x. AMX tiles and dot products both read rows of W as they lie, and at 1
    to 16 rows that already takes no longer than reading them.

    Up to 64 rows in bfloat16 on a CPU, a row's result depends on that row and W alone: neither on
    the number of rows, nor on their place, nor on threads. More rows, other dtypes and devices are
    `F.linear`, which promises none of this. No gradients.

    Args:
        x_SD: rows.
        weight_FD: contiguous, of the same dtype.
    """
    if torch.compiler.is_compiling():
        return registered(x_SD, weight_FD)
    return _computed(x_SD, weight_FD)


def _computed(x_SD: Tensor, weight_FD: Tensor) -> Tensor:
    few = 0 < x_SD.shape[0] <= native.MOST_ROWS
    if few and native.serves(x_SD, weight_FD) and weight_FD.is_contiguous():
        return native.packed_linear(x_SD, weight_FD)
    return F.linear(x_SD, weight_FD)


@torch.library.custom_op("phalanx::packed_linear", mutates_args=())
def registered(x_SD: Tensor, weight_FD: Tensor) -> Tensor:
    """`packed_linear` as an operator of torch, for graphs and fake tensors."""
    return _computed(x_SD, weight_FD)


@registered.register_fake
def _(x_SD: Tensor, weight_FD: Tensor) -> Tensor:
    return x_SD.new_empty((x_SD.shape[0], weight_FD.shape[0]))
