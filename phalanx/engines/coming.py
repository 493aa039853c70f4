"""Values on their way from a device to the host, behind the work that makes them.

    coming = Coming([loss, norm])     # copies follow what was asked of the device so far
    ...                               # the next step is asked of it
    loss, norm = coming.arrived()     # waits for the copies, not for the next step

`tensor.tolist()` in the last line would wait for the next step too: its own copy would be behind
all of it. Copies to memory that is not pinned hold up the host one by one, and are slower.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Coming:
    """Copies that are under way; tensors of the host are what comes of them.

    Args:
        tensors: which nobody changes before they have arrived.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors: Sequence[Tensor] = tensors
        self._copied: torch.cuda.Event | None = None
        on_gpu = [each for each in tensors if each.is_cuda]
        if on_gpu and torch.cuda.is_available():  # without: tensors without values
            self._tensors = [pinned_like(each).copy_(each, non_blocking=True) for each in tensors]
            self._copied = torch.cuda.current_stream(on_gpu[0].device).record_event()

    def arrived(self) -> Sequence[Tensor]:
        """The values, in host memory; waits for them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensors


def pinned_like(tensor: Tensor) -> Tensor:
    """Host memory of a tensor's shape and dtype; torch keeps such memory for the next time, and
    gives none away that a copy still reads."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
