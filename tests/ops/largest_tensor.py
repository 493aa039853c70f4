"""How large the largest tensor is that some code makes."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Context manager; afterwards `num_bytes` of the largest storage that an operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.num_bytes = max(self.num_bytes, out.untyped_storage().nbytes())
        return out
