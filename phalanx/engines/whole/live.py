"""One line that shows where a training run is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from phalanx.units import format_s

_PLAIN_EVERY = 10  # steps between lines where nothing can be redrawn


class Progress:
    """Turns the events of training into lines.

    Args:
        say: prints a whole line.
        num_steps: of the run.
        live: redraw one line on stderr; otherwise a line every ten steps.
    """

    def __init__(self, say: Callable[[str], None], num_steps: int, live: bool) -> None:
        self._say, self._num_steps, self._live = say, num_steps, live
        self._drawn = False

    def hear(self, event: Mapping[str, Any]) -> None:
        """An event of rank 0."""
        kind = event["kind"]
        if kind == "step":
            self._step(event)
        elif kind == "evaluate":
            self._line(f"held-out loss after step {event['step']}: {event['loss']:.4f}")
        elif kind == "log":
            self._line(str(event["text"]))

    def close(self) -> None:
        """End the line that is being redrawn."""
        if self._drawn:
            print(file=sys.stderr)
            self._drawn = False

    def _step(self, event: Mapping[str, Any]) -> None:
        step = event["step"]
        left_s = (self._num_steps - step) * event["step_s"]
        text = (
            f"step {step}/{self._num_steps}  loss {event['loss']:.4f}  "
            f"{event['tokens_per_s']:.0f} tokens/s  {format_s(left_s)} left"
        )
        if self._live:
            print(f"\r{text:<78}", end="", file=sys.stderr, flush=True)
            self._drawn = True
        elif step == 1 or step % _PLAIN_EVERY == 0 or step == self._num_steps:
            self._say(text)

    def _line(self, text: str) -> None:
        self.close()
        self._say(text)
