"""SIGTERM and Ctrl-C as a question that a run asks between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Catches the signals while it is open; a second one of a kind acts as it would without it.

        with StopSignal() as stop:
            for step in ...:
                train_step(wants_stop=stop.requested)  # the ranks have to agree on it

    Only the main thread of a process may catch signals: in another one nothing is caught.

    Attributes:
        signal: that came; None: none did.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop; others may not have been."""
        return self.signal is not None

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for each in SIGNALS:
                self._before[each] = signal.signal(each, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for each in list(self._before):
            self._give_back(each)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._give_back(self.signal)

    def _give_back(self, each: signal.Signals) -> None:
        signal.signal(each, self._before.pop(each))
