"""Links that several messages share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

_ROUNDING = 1e-12  # messages that end at one moment in exact arithmetic end at one moment here


class Clock(Protocol):
    """The part of the engine that a link needs."""

    now_s: float

    def at(self, time_s: float, hook: Callable[[], None]) -> None:
        """Call `hook` at `time_s`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Links:
    """Which link a message takes, and how many fit on it.

    A message alone takes the cost model's `transfer_s`. While n messages are on a link of width w,
    each proceeds at min(1, w / n) of that speed (processor sharing: fair and without a queue). The
    latency part comes first and is not shared.

    Attributes:
        link_of: (source, target) -> name of the link, or None for a private one.
        width: name -> how many messages proceed at full speed together (1 for links not listed);
            a 4 : 1 oversubscribed uplink of 32 devices has width 8.
    """

    link_of: Callable[[int, int], str | None]
    width: Mapping[str, float] = field(default_factory=dict)


class SharedLink:
    """One link under processor sharing.

    `_served_s` is the service that a message on the link since ever would have received. A message
    that needs `work_s` more is done when the served time has grown by that much, whoever else comes
    or goes: a change of rate costs one look at the front of a heap, not a walk over all messages.
    """

    def __init__(self, clock: Clock, width: float) -> None:
        self._clock, self._width = clock, width
        self._served_s = 0.0
        self._since_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._alarm = 0

    def add(self, work_s: float, done: Callable[[], None]) -> None:
        """Put a message on the link; `done` is called when it is through."""
        self._advance()
        self._count += 1
        heappush(self._queue, (self._served_s + work_s, self._count, done))
        self._set_alarm()

    def _rate(self) -> float:
        return min(1.0, self._width / len(self._queue))

    def _advance(self) -> None:
        now_s = self._clock.now_s
        if self._queue:
            self._served_s += (now_s - self._since_s) * self._rate()
        else:
            self._served_s = 0.0  # keeps the digits of long simulations
        self._since_s = now_s

    def _set_alarm(self) -> None:
        self._alarm += 1
        if not self._queue:
            return
        left_s = max(0.0, self._queue[0][0] - self._served_s)
        number = self._alarm
        self._clock.at(self._clock.now_s + left_s / self._rate(), lambda: self._ring(number))

    def _ring(self, number: int) -> None:
        if number != self._alarm:
            return  # the rate changed meanwhile, and with it the moment
        self._advance()
        # The front is through by construction, whatever rounding left of it.
        self._served_s = max(self._served_s, self._queue[0][0])
        through = self._served_s * (1 + _ROUNDING)
        done = []
        while self._queue and self._queue[0][0] <= through:
            done.append(heappop(self._queue)[2])
        self._set_alarm()
        for call in done:
            call()
