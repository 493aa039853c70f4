"""Bytes that are alive: storages that operators have made and nobody has let go of."""

from __future__ import annotations

from collections.abc import Iterable
from time import sleep

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While entered, notes every storage that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self._made[StorageWeakRef(storage)] = storage.nbytes()
        return result

    def now(self, besides: Iterable[torch.Tensor] = ()) -> int:
        """Bytes alive now, without the storages of `besides`."""
        skipped = {StorageWeakRef(tensor.untyped_storage()) for tensor in besides}
        return sum(
            num_bytes
            for storage, num_bytes in self._made.items()
            if not storage.expired() and storage not in skipped
        )

    def settled(self, besides: Iterable[torch.Tensor] = (), patience_s: float = 0.3) -> int:
        """The least alive within `patience_s`: the threads of gloo let go of what they sent or
        summed a moment after the collective is over."""
        besides, steps = list(besides), 30
        found = self.now(besides)
        for _ in range(steps):
            sleep(patience_s / steps)
            found = min(found, self.now(besides))
        return found
