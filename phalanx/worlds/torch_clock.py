"""When something happened on the device that did it, without waiting for it."""

from __future__ import annotations

from functools import cache
from time import perf_counter
from typing import NamedTuple

import torch

_FAR_S = 60.0  # from here on the milliseconds between two events, a float32, are rounded to 4 us


class _Zero:
    """An event that others are timed from.

    Args:
        event: recorded on the device.
        at_s: when that was, by `time.perf_counter`.
        before: without `at_s`: the zero that this one is timed from.
    """

    def __init__(
        self, event: torch.Event, at_s: float | None = None, before: _Zero | None = None
    ) -> None:
        self.event, self.issued_s = event, perf_counter()
        self._at_s, self._before = at_s, before

    def seconds(self) -> float:
        """When it was recorded; waits for it."""
        if self._at_s is None:
            assert self._before is not None
            self._at_s = self._before.seconds_of(self.event)
            self._before = None
        return self._at_s

    def seconds_of(self, event: torch.Event) -> float:
        """When another event was recorded; waits for it."""
        event.synchronize()
        return self.seconds() + self.event.elapsed_time(event) * 1e-3


class _Timed(NamedTuple):
    """An event and the zero before it."""

    event: torch.Event
    zero: _Zero


Moment = float | _Timed


class DeviceClock:
    """Moments on a device, in the seconds of `time.perf_counter`.

    On a CPU a moment is the host's time. On an accelerator it is an event in the current stream, so
    taking it costs no synchronisation; `seconds` waits for it. Devices give the time between two
    events as a float32 of milliseconds, which a day later is rounded to 8 ms: the event that others
    are timed from is a new one every minute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type != "cpu":
            torch.accelerator.synchronize(device)  # once, so that the two clocks meet
            at_s = perf_counter()
            self._zero = _Zero(self._event(), at_s)

    def now(self) -> Moment:
        """The present moment; the host's while a graph is captured."""
        on_host = self._device.type == "cpu"
        if on_host or (self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return perf_counter()
        event, zero = self._event(), self._zero
        if perf_counter() - zero.issued_s > _FAR_S and zero.event.query():
            zero.seconds()  # known from now on, so that no chain of unknown ones grows
            self._zero = _Zero(event, before=zero)
        return _Timed(event, zero)

    def seconds(self, moment: Moment) -> float:
        """A moment as a number."""
        if isinstance(moment, float):
            return moment
        return moment.zero.seconds_of(moment.event)

    def _event(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


@cache
def clock_of(device: torch.device) -> DeviceClock:
    """The clock of a device, one per process."""
    return DeviceClock(device)
