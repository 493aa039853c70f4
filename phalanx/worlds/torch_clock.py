"""When something happened on the device that did it, without waiting for it."""

from __future__ import annotations

from functools import cache
from time import perf_counter

import torch

Moment = float | torch.Event


class DeviceClock:
    """Moments on a device, in the seconds of `time.perf_counter`.

    On a CPU a moment is the host's time. On an accelerator it is an event in the current stream, so
    taking it costs no synchronisation; `seconds` waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type != "cpu":
            torch.accelerator.synchronize(device)  # once, so that the two clocks meet
            self._zero_s, self._zero = perf_counter(), self._event()

    def now(self) -> Moment:
        """The present moment; the host's while a graph is captured."""
        on_host = self._device.type == "cpu"
        if on_host or (self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return perf_counter()
        return self._event()

    def seconds(self, moment: Moment) -> float:
        """A moment as a number."""
        if isinstance(moment, float):
            return moment
        moment.synchronize()
        return self._zero_s + self._zero.elapsed_time(moment) * 1e-3

    def _event(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


@cache
def clock_of(device: torch.device) -> DeviceClock:
    """The clock of a device, one per process."""
    return DeviceClock(device)
