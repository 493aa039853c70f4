"""Arrays of the host on a device, without waiting for what runs there."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def placed(array: np.ndarray, device: torch.device | str) -> Tensor:
    """The array's values on `device`; on the CPU its own memory.

    To a GPU they go through pinned memory: a copy from any other first waits until the GPU has done
    all that was asked of it. torch keeps the pinned copy until it has been read.
    """
    tensor, device = torch.from_numpy(array), torch.device(device)
    if device.type == "cuda" and torch.cuda.is_available():  # without: tensors without values
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
