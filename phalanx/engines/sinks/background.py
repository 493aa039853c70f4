"""A sink on a thread of its own, whose failures and delays stay there."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from phalanx.engines.callbacks import Callback, Run

_MOST_WAITING = 10_000  # lines that a sink that hangs may leave waiting; later ones are dropped


class SinkWriter(Protocol):
    """What knows how to write to one service. All calls come from one thread."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step, by name."""

    def close(self) -> None:
        """Nothing more comes; returns when all is written."""


class Patience:
    """How long the end of a run waits, for all its sinks together.

    Args:
        seconds: from the first question on.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end_s: float | None = None

    def left_s(self) -> float:
        """What is left of it."""
        now_s = time.monotonic()
        if self._end_s is None:
            self._end_s = now_s + self.seconds
        return max(0.0, self._end_s - now_s)


class BackgroundSink(Callback):
    """Hands numbers to a writer and never waits for it while training.

    Args:
        name: in warnings.
        open_writer: called on the sink's thread with the job as a flat dict.
        warn: gets one line at the first failure; the sink is silent from then on.
        patience: how long the end of the run waits for what is not written yet.
    """

    def __init__(
        self,
        name: str,
        open_writer: Callable[[dict[str, Any]], SinkWriter],
        warn: Callable[[str], None],
        *,
        patience: Patience,
    ) -> None:
        self.name, self._open, self._warn, self._patience = name, open_writer, warn, patience
        self._lines: queue.Queue = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._failure = ""
        self._has_warned = False

    def on_start(self, run: Run) -> None:
        """Begin to open the writer, on rank 0."""
        if run.leads:
            config = {key: _plain(value) for key, value, _ in run.job.values()}
            self._thread = threading.Thread(
                target=self._write_all, args=(config,), name=f"sink {self.name}", daemon=True
            )
            self._thread.start()

    def on_step(self, run: Run) -> None:
        """Numbers of a step, under "train/"."""
        self._put(run.step, "train", run.metrics)

    def on_evaluate(self, run: Run) -> None:
        """Numbers of an evaluation, under "evaluate/"."""
        self._put(run.step, "evaluate", run.evaluation)

    def on_end(self, run: Run) -> None:
        """Wait for the writer, but not for ever."""
        if self._thread is None:
            return
        try:
            self._lines.put(None, timeout=self._patience.left_s())
        except queue.Full:
            pass
        self._thread.join(self._patience.left_s())
        if self._thread.is_alive() and not self._failure:
            self._failure = f"did not finish within {self._patience.seconds:g} s"
        self._tell()

    def _put(self, step: int, prefix: str, metrics: Mapping[str, Any]) -> None:
        self._tell()
        if self._thread is None or self._failure:
            return
        values = {
            f"{prefix}/{name}": float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float) and name != "step"
        }
        try:
            self._lines.put_nowait((step, values))
        except queue.Full:
            self._failure = "does not answer"

    def _tell(self) -> None:
        """Say once that the sink has failed, on the thread that trains."""
        if self._failure and not self._has_warned:
            self._has_warned = True
            self._warn(f"{self.name} gets no more metrics: {self._failure}; training goes on")

    def _write_all(self, config: dict[str, Any]) -> None:
        try:
            writer = self._open(config)
            while (line := self._lines.get()) is not None:
                writer.write(*line)
            writer.close()
        except BaseException as error:  # whatever a foreign package raises, SystemExit too
            text = " ".join(str(error).split())[:300]
            self._failure = f"{type(error).__name__}: {text}" if text else type(error).__name__


def _plain(value: Any) -> Any:
    """A value of a job as services take it."""
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value)
