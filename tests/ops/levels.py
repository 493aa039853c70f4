"""The levels of processor features that this machine can be made to use, and error bounds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.ops import native

HALF_STEP = 2.0**-8  # of rounding to bfloat16, relative
LEVELS = native.levels()
at_each_level = pytest.mark.parametrize("level", LEVELS)


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    """Normal numbers in bfloat16."""
    return (torch.randn(shape) * scale).to(torch.bfloat16)


def require_rounded_once(found: Tensor, exact: Tensor, sum_of_sizes: Tensor, terms: int) -> None:
    """A sum of so many products in float32, rounded once to bfloat16.

    Args:
        exact: the sums in float64.
        sum_of_sizes: sums of the products' absolute values; float32 sums err by at most `terms`
            units of 2^-24 of it, in any order.
    """
    error = (found.double() - exact).abs()
    allowed = HALF_STEP * exact.abs() + terms * 2.0**-23 * sum_of_sizes + 2.0**-126
    assert found.dtype == torch.bfloat16
    assert (error <= allowed).all(), (error / allowed).max()
