"""The values of a moment in host memory, while training goes on.

On the CPU nothing is copied at first: weights and moments stay as they are until the next update,
and most of a step is forward and backward. What is not on the disk when the update comes is copied
then. On CUDA everything is copied at once, by the device itself and behind the step before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

SLAB_BYTES, _ALIGNED = 1 << 30, 64
PIECE_BYTES = 1 << 23  # what is read from a tensor before an update may come between


class Form(NamedTuple):
    """What is known of a tensor without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    num_bytes: int


class Values:
    """Tensors of one moment, to be read once.

    Args:
        tensors: on the CPU.
        is_own: nobody else ever changes them (a device may still be filling them); False: nobody
            does before `detach`.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, is_own: bool = False) -> None:
        self.forms = {
            name: Form(each.dtype, tuple(each.shape), each.nbytes) for name, each in tensors.items()
        }
        self._rest = {name: _as_bytes(each) for name, each in tensors.items()}
        self._piece = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        self._lock = threading.Lock()
        self._is_own = is_own

    def read(self, name: str, sink: Callable[[memoryview], object]) -> None:
        """Hand the bytes of a tensor to `sink`, piece by piece, and forget them."""
        while (piece := self._next_piece(name)) is not None:
            sink(piece)

    def _next_piece(self, name: str) -> memoryview | None:
        """Copied, so that an update never waits for a disk."""
        with self._lock:
            rest = self._rest.pop(name)
            if not rest.numel():
                return None
            piece, self._rest[name] = rest[:PIECE_BYTES], rest[PIECE_BYTES:]
            if not self._is_own:
                piece = self._piece[: piece.numel()].copy_(piece)
            return memoryview(piece.numpy())

    def detach(self) -> None:
        """Copy what was not read yet: the tensors are about to change."""
        with self._lock:
            if not self._is_own:
                self._rest = {name: rest.clone() for name, rest in self._rest.items()}
                self._is_own = True

    def forget(self) -> None:
        """Nothing more will be read."""
        with self._lock:
            self._rest = {}


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _pinned(like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Pinned memory for copies of these, many in a slab: torch rounds every piece of such memory up
    to a power of two, which on average would take a third more than the tensors."""
    slabs: list[list[str]] = []
    room = 0
    sizes = {name: -(-each.nbytes // _ALIGNED) * _ALIGNED for name, each in like.items()}
    for name, size in sizes.items():
        if size > room:
            slabs.append([])
            room = max(SLAB_BYTES, size)
        slabs[-1].append(name)
        room -= size
    found: dict[str, Tensor] = {}
    for names in slabs:
        slab = torch.empty(sum(map(sizes.get, names)), dtype=torch.uint8, pin_memory=True)
        for name, part in zip(names, slab.split([sizes[name] for name in names])):
            each = like[name]
            found[name] = part[: each.nbytes].view(each.dtype).view(each.shape)
    return found


class Staging:
    """Where the values of one snapshot are.

    On CUDA: in memory that is taken once and kept, pinned for what comes from the device. Copies
    run on the current stream, so the update of the next step comes behind them.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._kept: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def take(self, tensors: Mapping[str, Tensor]) -> Values:
        """The values as they are now; on CUDA complete only after `wait`."""
        if not self._is_cuda:
            return Values(tensors)
        new = {name: each for name, each in tensors.items() if name not in self._kept}
        self._kept |= _pinned({name: each for name, each in new.items() if each.is_cuda})
        for name, each in tensors.items():
            if name not in self._kept:  # an offloaded state
                self._kept[name] = torch.empty_like(each)
            self._kept[name].copy_(each, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()
        return Values({name: self._kept[name] for name in tensors}, is_own=True)

    def wait(self) -> None:
        """Until the values of the last `take` are there."""
        if self._copied is not None:
            self._copied.synchronize()
