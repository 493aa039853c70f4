"""A device on the CPU that copies late, so that who reads too early reads no number."""

from __future__ import annotations

import torch

from phalanx.engines import coming


class LateDevice:
    """What `non_blocking` asks for is done when somebody waits for it.

    While it is there all tensors say that they are on a GPU.

    Attributes:
        num_waits: how often the host waited.
        pinned_bytes: of all memory that was asked for.
    """

    def __init__(self, monkeypatch) -> None:
        self.num_waits = self.pinned_bytes = 0
        self._asked: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        self._copy, self._empty = torch.Tensor.copy_, torch.empty
        device = self

        def copy_(target, source, non_blocking=False):
            if not non_blocking:
                return device._copy(target, source)
            device._asked.append((target, source))
            return target

        monkeypatch.setattr(torch.Tensor, "copy_", copy_)
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
        monkeypatch.setattr(coming.torch, "empty", self._pinned)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: self)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    @property
    def num_asked(self) -> int:
        """Copies that were asked for and not done."""
        return sum(each is not None for each in self._asked)

    def record_event(self) -> Event:
        return Event(self, len(self._asked))

    def finish(self, count: int | None = None) -> None:
        """Do the first copies, or all."""
        for at, pair in enumerate(self._asked[:count]):
            if pair is not None:
                self._copy(*pair)
                self._asked[at] = None

    def _pinned(self, shape, *, dtype, pin_memory):
        assert pin_memory
        found = self._empty(shape, dtype=dtype).fill_(float("nan"))
        self.pinned_bytes += found.nbytes
        return found


class Event:
    """A place among the copies."""

    def __init__(self, device: LateDevice, count: int) -> None:
        self._device, self._count = device, count

    def synchronize(self) -> None:
        self._device.num_waits += 1
        self._device.finish(self._count)
