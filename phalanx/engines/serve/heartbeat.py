"""How a front end knows that its engine process makes progress.

    BEAT_S      0.5    between beats, sent by a thread of the engine process
    SILENT_S    3.0    without a message: the process is stopped or starved
    GRACE_S     4.0    that the engine may stay unhealthy before its process is given up

Three ways to stand still. *Silent*: no message comes. *Stuck*: beats come and say that the loop has
been busy with one thing for longer than `stall_s` (loading a folder is not counted). *Forgetful*:
the loop waits although requests are open, and no step was taken for `stall_s`; a scheduler that
forgets a request looks like that. A long step alone is neither, as beats come from a thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from phalanx.engines.serve.wire import LineSocket
from phalanx.errors import WorldError

BEAT_S = 0.5
SILENT_S = 3.0
GRACE_S = 4.0
TICK_S = 0.25
_LAST_S = 2.0  # for a core without a front end to end in an orderly way


class Heartbeat:
    """The core's side: a daemon thread that beats from now on.

    When the front end is gone, the process ends, even from within a long step or while it loads.

    Args:
        lines: the socket that the main thread uses too.
        leave: ends the process.
    """

    def __init__(self, lines: LineSocket, leave: Callable[[int], Any] = os._exit) -> None:
        self._lines, self._leave = lines, leave
        self._counters: Callable[[], Mapping[str, int]] = dict
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def watch(self, counters: Callable[[], Mapping[str, int]]) -> None:
        """Send what this returns with every beat; it is called from the thread."""
        self._counters = counters

    def close(self) -> None:
        """Beat no more."""
        self._closed.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            busy_s = self._lines.busy_s
            beat = {"kind": "beat", "busy_s": busy_s, "counters": dict(self._counters())}
            if not self._lines.send(beat):
                if not self._closed.wait(_LAST_S):
                    self._leave(1)
                return


class Pulse:
    """The front end's side. Holds no clock: it is told how much time went by.

    Args:
        stall_s: longest step.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self.silent_s = 0.0  # since any message
        self.busy_s = 0.0  # with one thing
        self.idle_s = 0.0  # although there is work
        self._is_busy = False

    def hear(self, message: Mapping[str, Any]) -> None:
        """A message came."""
        self.silent_s = 0.0
        if message["kind"] == "beat":
            busy_s = message.get("busy_s")
            self._is_busy = busy_s is not None
            self.busy_s = float(busy_s or 0.0)
        else:
            self.busy_s = 0.0
        if self._is_busy or message["kind"] == "step":
            self.idle_s = 0.0

    def wait(self, elapsed_s: float, *, has_work: bool) -> None:
        """Time went by.

        Args:
            elapsed_s: since the last call; more than twice `TICK_S` is not counted, because then it
                was the front end that stood still.
            has_work: whether the engine holds a request that it could compute.
        """
        counted_s = min(elapsed_s, 2 * TICK_S)
        self.silent_s += counted_s
        if self._is_busy:
            self.busy_s += counted_s
        self.idle_s = self.idle_s + counted_s if has_work and not self._is_busy else 0.0

    @property
    def over_s(self) -> float:
        """Seconds without progress beyond what is allowed; at most 0 when all is well."""
        allowed_s = self._stall_s
        return max(self.silent_s - SILENT_S, self.busy_s - allowed_s, self.idle_s - allowed_s)

    def complaint(self) -> WorldError | None:
        """`serve/engine` when the engine makes no progress."""
        if self.over_s <= 0:
            return None
        if self.silent_s > SILENT_S:
            seconds, rule = self.silent_s, f"its process must be heard of within {SILENT_S:g} s"
        elif self.busy_s > self._stall_s:
            seconds, rule = self.busy_s, f"one step must take at most {self._stall_s:g} s"
        else:
            rule = f"requests wait and no step was taken; the limit is {self._stall_s:g} s"
            seconds = self.idle_s
        where = "engine: seconds without progress"
        return WorldError("serve/engine", where, f"{seconds:.1f}", rule)
