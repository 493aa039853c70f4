"""When the actions of a step were executed, by the clock of the device that executed them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch


class SpanLog:
    """Start and end of each action of the latest step.

    On a CPU the times are the host's. On an accelerator an action is marked by events in the
    current stream, so nothing is waited for until `spans_s` is called.

    Args:
        device: where the actions compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[list[Any]] = []
        self._origin_s = self._step_s = time.perf_counter()
        self._step_mark: Any = None

    def restart(self) -> None:
        """Forget the previous step; a new one begins now."""
        self._spans = []
        self._step_s, self._step_mark = time.perf_counter(), self._now()

    def follow(self, actions: Iterator[Any]) -> Iterator[Any]:
        """The same actions; one ends when the next is asked for."""
        for action in actions:
            span = [action, self._now(), None]
            self._spans.append(span)
            yield action
            span[2] = self._now()

    def input_arrived(self) -> None:
        """The current action has waited for its input and starts now."""
        self._spans[-1][1] = self._now()

    def spans_s(self) -> Iterator[tuple[Any, float, float]]:
        """Actions that ended, with start and end in seconds since this log was made."""
        first_s = self._step_s - self._origin_s
        for action, start, end in self._spans:
            if end is not None:
                yield action, first_s + self._since(start), first_s + self._since(end)

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _since(self, mark: Any) -> float:
        if self._device.type == "cpu":
            return mark - self._step_mark
        mark.synchronize()
        return self._step_mark.elapsed_time(mark) * 1e-3


class FollowedList(list):
    """A list of actions whose next pass is followed by a log, for loops that have no hook."""

    def __init__(self, actions: list[Any], log: SpanLog) -> None:
        super().__init__(actions)
        self._log, self._armed = log, False

    def arm(self) -> None:
        """The next iteration is the execution of a step."""
        self._armed = True
        self._log.restart()

    def __iter__(self) -> Iterator[Any]:
        armed, self._armed = self._armed, False
        actions = super().__iter__()
        return self._log.follow(actions) if armed else actions
