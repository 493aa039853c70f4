"""When the actions of a step were executed, for loops of torch's that have no hook."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from phalanx.worlds.torch_clock import clock_of


class SpanLog:
    """Start and end of each action of the latest step, by the device's clock.

    Args:
        device: where the actions compute.

    Attributes:
        origin_s: `time.perf_counter` that counts as 0.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        self.origin_s = time.perf_counter()
        self._spans: list[list[Any]] = []

    def restart(self) -> None:
        """Forget the previous step."""
        self._spans = []

    def follow(self, actions: Iterator[Any]) -> Iterator[Any]:
        """The same actions; one ends when the next is asked for."""
        for action in actions:
            span = [action, self._clock.now(), None]
            self._spans.append(span)
            yield action
            span[2] = self._clock.now()

    def input_arrived(self) -> None:
        """The current action has waited for its input and starts now."""
        self._spans[-1][1] = self._clock.now()

    def spans_s(self) -> Iterator[tuple[Any, float, float]]:
        """Actions that ended, with start and end in seconds since this log was made."""
        for action, start, end in self._spans:
            if end is not None:
                times = [self._clock.seconds(moment) - self.origin_s for moment in (start, end)]
                yield action, times[0], times[1]


class FollowedList(list):
    """A list of actions whose next pass is followed by a log.

    Args:
        actions: of one rank.
        log: that follows.
        after: called with each action when it has ended, outside its span.
    """

    def __init__(
        self, actions: list[Any], log: SpanLog, after: Callable[[Any], None] | None = None
    ) -> None:
        super().__init__(actions)
        self._log, self._after, self._armed = log, after, False

    def arm(self) -> None:
        """The next iteration is the execution of a step."""
        self._armed = True

    def __iter__(self) -> Iterator[Any]:
        armed, self._armed = self._armed, False
        actions = super().__iter__()
        return self._log.follow(self._ended(actions)) if armed else actions

    def _ended(self, actions: Iterator[Any]) -> Iterator[Any]:
        for action in actions:
            yield action
            if self._after is not None:
                self._after(action)
