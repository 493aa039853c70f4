"""What a rank computes of a product that tensor parallelism has cut.

Legend: S tokens, I inputs, O outputs, o and i a rank's part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.engines.overlapped import Later, product, weight_later
from phalanx.ops.dropout import DropoutKey


class CutProduct:
    """The forward pass of an `nn.Linear`, adapted or not, on what this rank holds of it.

    Args:
        module: whose parameters are plain or cut (DTensor).
        rows: of the whole weights, those that this rank computes; None: all that it holds.
        first_channel: place of the rank's first input among all inputs.
        leaves: exchange behind it, or None.
    """

    def __init__(
        self,
        module: nn.Linear,
        rows: Sequence[int] | None,
        first_channel: int,
        leaves: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self._module, self._first_channel, self._leaves = module, first_channel, leaves
        self._rows: slice | Tensor | None = None if rows is None else _as_index(rows)
        self._later: tuple[Tensor, Later] | None = None

    @property
    def can_defer(self) -> bool:
        """Whether the gradient of the weight can wait: a column product without an adapter."""
        module = self._module
        adapted = hasattr(module, "lora_A")
        return self._leaves is None and not adapted and module.weight.requires_grad

    def defer(self) -> None:
        """The next call computes its weight's gradient behind the block's exchange."""
        later = Later()
        self._later = (weight_later(self._held(self._module.weight), later), later)

    def __call__(self, x_Si: Tensor, dropout: DropoutKey | None = None) -> Tensor:
        """[S, o], or what `leaves` makes of it."""
        module = self._module
        if self._later is not None:
            (weight_oi, later), self._later = self._later, None
            return product(x_Si, weight_oi, later)
        weight_oi = self._held(module.weight)
        if hasattr(module, "lora_A"):
            down_Ri, up_oR = held(module.lora_A.weight), self._held(module.lora_B.weight)
            out_So = module.product(x_Si, weight_oi, down_Ri, up_oR, dropout, self._first_channel)
        else:
            out_So = F.linear(x_Si, weight_oi)
        return out_So if self._leaves is None else self._leaves(out_So)

    def _held(self, parameter: Tensor) -> Tensor:
        part = held(parameter)
        if self._rows is None:
            return part
        if isinstance(self._rows, slice):
            return part[self._rows]
        self._rows = self._rows.to(part.device)  # copied once
        return part.index_select(0, self._rows)


def held(parameter: Tensor) -> Tensor:
    """The part of a parameter that this rank holds, with gradient."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _as_index(rows: Sequence[int]) -> slice | Tensor:
    if list(rows) == list(range(rows[0], rows[-1] + 1)):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows)
