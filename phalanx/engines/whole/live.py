"""One line that shows where a training run is."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from phalanx.units import format_bytes

_PLAIN_EVERY_S = 15.0  # between lines where nothing can be redrawn


class Progress:
    """Turns the events of training into lines; use it as a context.

    Args:
        say: prints a whole line.
        live: redraw one line on stderr; otherwise a line every 15 s.

    Attributes:
        interrupted: the event that said that a signal stopped the run, or {}.
        step: the newest that was heard of; 0 before the first.
    """

    def __init__(self, say: Callable[[str], None], live: bool) -> None:
        self._say, self._live = say, live
        self._drawn = False
        self._said_s = float("-inf")
        self.interrupted: Mapping[str, Any] = {}
        self.step = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_line()

    def hear(self, event: Mapping[str, Any]) -> None:
        """An event of rank 0."""
        kind = event["kind"]
        if kind == "step":
            self._step(event)
        elif kind == "evaluate":
            self._line(f"held-out loss after step {event['step']}: {event['loss']:.4f}")
        elif kind == "checkpoint":
            self._line(f"checkpoint after step {event['step']}: {event['path']}")
        elif kind in ("log", "warning"):
            self._line(("warning: " if kind == "warning" else "") + str(event["text"]))
        elif kind == "stopped":
            self._stopped(event)

    def _stopped(self, event: Mapping[str, Any]) -> None:
        if event["reason"] == "signal":
            self.interrupted = event
        else:
            self._line(f"stopped after step {event['step']}: {event['reason']}")

    def _step(self, event: Mapping[str, Any]) -> None:
        self.step = step = event["step"]
        num_steps = event["num_steps"]
        parts = [
            f"step {step}/{num_steps}",
            f"loss {event['loss']:.4f}",
            f"{event['counted_tokens_per_s']:.0f} counted tokens/s",
            f"{_clock((num_steps - step) * event['step_s'])} left",
            f"{format_bytes(event['memory_bytes'])} per process",
        ]
        text = "  ".join(parts)
        if self._live:
            width = shutil.get_terminal_size(fallback=(80, 24)).columns - 1
            print(f"\r{text[:width]:<{width}}", end="", file=sys.stderr, flush=True)
            self._drawn = True
        elif step in (1, num_steps) or monotonic() - self._said_s > _PLAIN_EVERY_S:
            self._said_s = monotonic()
            self._say(text)

    def _line(self, text: str) -> None:
        self._end_line()
        self._say(text)

    def _end_line(self) -> None:
        if self._drawn:
            print(file=sys.stderr)
            self._drawn = False


def _clock(seconds: float) -> str:
    """75 s as 1:15, 3,700 s as 1:01:40."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
