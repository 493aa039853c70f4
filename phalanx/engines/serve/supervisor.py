"""Keeps one engine process running: starts it, hears it, ends it when it stands still, and again.

    starting --ready--> ready --ended, or given up--> starting (again, after a pause)
                                                  \\-> down (too often in a row; for ever)

A process is given up when it made no progress for `heartbeat.GRACE_S` longer than is allowed; until
then it may recover. The pauses are 0, 1, 2, 4 .. 30 s. "In a row" means without a request that was
served to its end in between.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from phalanx.engines.serve.heartbeat import GRACE_S, TICK_S, Pulse
from phalanx.engines.serve.process import CoreProcess
from phalanx.engines.serve.settings import ServeSettings
from phalanx.engines.serve.wire import error_from_json
from phalanx.errors import PhalanxError, WorldError

_LOAD_SILENT_S = 60.0
_LONGEST_PAUSE_S = 30.0


class Owner(Protocol):
    """Whom a supervisor works for."""

    @property
    def has_work(self) -> bool:
        """Whether the engine holds a request that it could compute."""
        ...

    def hear(self, message: Mapping[str, Any]) -> None:
        """A message of the engine."""
        ...

    def lose(self, error: PhalanxError) -> None:
        """The engine process is gone, and all that it held."""
        ...

    async def restore(self) -> None:
        """A new process is there: bring it to where the old one was."""
        ...


class Supervisor:
    """Made with the settings; `start` starts the first process.

    Attributes:
        state: "starting", "ready" or "down".
        ready: what the engine said when it was ready.
        error: why the last process ended.
        num_in_a_row: processes started again since a request was served.
        down: is set when no process will be started any more.
    """

    def __init__(
        self, settings: ServeSettings, owner: Owner, on_restart: Callable[[], object]
    ) -> None:
        self._settings, self._owner, self._on_restart = settings, owner, on_restart
        self.state = "starting"
        self.ready: dict[str, Any] = {}
        self.error: PhalanxError | None = None
        self.num_in_a_row = 0
        self.may_restart = True
        self.down = asyncio.Event()
        self._pulse = Pulse(settings.stall_s)
        self._process: CoreProcess | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start a process and wait until its model is loaded; from then on it is looked after.

        Raises:
            JobError, PlanError: what the engine found wrong with the settings or the folder.
            WorldError: `serve/engine` when it ended without a word.
        """
        await self._start_process(self._settings)
        self.state = "ready"
        self._task = asyncio.create_task(self._supervise())

    def send(self, message: Mapping[str, Any]) -> None:
        """To the process, if there is one."""
        if self._process is not None:
            self._process.send(message)

    def complaint(self) -> PhalanxError | None:
        """Why no request can be served now; None while the engine makes progress."""
        if self.state == "ready":
            return self._pulse.complaint()
        if self.error is None:
            return _engine_error("it loads its model")
        what = "a new one is started" if self.state == "starting" else "it is not started again"
        rule = f"{self.error.rule}; {what}"
        return WorldError("serve/engine", self.error.where, self.error.value, rule)

    async def close(self) -> None:
        """End the process."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.state = "down"
        if self._process is not None:
            await self._process.end()
            self._process = None
        self.down.set()

    # ---- one process -----------------------------------------------------------------------------

    async def _start_process(self, settings: ServeSettings) -> None:
        self._process = await CoreProcess.start(settings)
        try:
            self.ready = await self._await_ready(self._process)
        except BaseException:
            self._process.kill()  # while it loads it does not look at its socket
            await self._process.end()
            self._process = None
            raise
        self._pulse = Pulse(settings.stall_s)

    async def _await_ready(self, process: CoreProcess) -> dict[str, Any]:
        while True:
            try:
                async with asyncio.timeout(_LOAD_SILENT_S):
                    message = await process.receive()
            except TimeoutError:
                rule = f"must be heard of within {_LOAD_SILENT_S:g} s while it loads"
                raise WorldError("serve/engine", "engine process", None, rule) from None
            if message is None:
                raise await process.death()
            if message["kind"] == "failed":
                raise error_from_json(message["error"])
            if message["kind"] == "ready":
                return message

    async def _live(self, process: CoreProcess, is_first: bool) -> PhalanxError:
        """Look after a process from its start to its end: why it ended."""
        jobs = [self._listen(process), self._watch()]
        if not is_first:
            jobs.append(self._restore())
        tasks = [asyncio.create_task(job) for job in jobs]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            if isinstance(error := task.exception(), PhalanxError):
                return error
            if error is not None:
                raise error
        raise AssertionError("a process is listened to until it ends")

    async def _listen(self, process: CoreProcess) -> None:
        while (message := await process.receive()) is not None:
            self._pulse.hear(message)
            if message["kind"] == "failed":
                cause = error_from_json(message["error"])
                raise _engine_error(f"a step failed: {cause.sentence()}")
            try:
                self._owner.hear(message)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                rule = f"a message of kind {message['kind']!r} cannot be read: {error!r}"
                raise _engine_error(rule) from error
        # told at once, although how it ended is known a little later
        self.state, self.error = "starting", _engine_error("the engine process ended")
        raise await process.death()

    async def _watch(self) -> None:
        before_s = time.monotonic()
        while self._pulse.over_s < GRACE_S:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            self._pulse.wait(now_s - before_s, has_work=self._owner.has_work)
            before_s = now_s
        complaint = self._pulse.complaint()
        assert complaint is not None
        raise complaint

    async def _restore(self) -> None:
        await self._owner.restore()
        self.state = "ready"

    # ---- one after the other ---------------------------------------------------------------------

    async def _supervise(self) -> None:
        is_first = True
        try:
            while self._process is not None:
                error = await self._live(self._process, is_first)
                is_first = False
                await self._bury(error)
                await self._start_again()
        except Exception as error:  # a mistake of ours must not leave requests without an end
            await self._bury(_engine_error(f"it cannot be looked after: {error!r}"))
            raise
        finally:
            self.state = "down"
            self.down.set()

    async def _bury(self, error: PhalanxError) -> None:
        self.state, self.error = "starting", error
        self._owner.lose(error)
        if self._process is not None:
            self._process.kill()
            await self._process.end()
            self._process = None

    async def _start_again(self) -> None:
        """Start another process; without one nothing more is started."""
        while self.may_restart and self.num_in_a_row < self._settings.restarts:
            await asyncio.sleep(_pause_s(self.num_in_a_row))
            self.num_in_a_row += 1
            self._on_restart()
            assert self.error is not None
            count = f"{self.num_in_a_row} of {self._settings.restarts}"
            _say(f"{self.error.sentence()}; starting another engine process ({count})")
            try:
                # adapters come back with `restore`: one that is missing now stops nothing else
                await self._start_process(replace(self._settings, adapters={}))
                return
            except PhalanxError as error:
                self.error = error


def _pause_s(num_before: int) -> float:
    return min(_LONGEST_PAUSE_S, 2.0 ** (num_before - 1)) if num_before else 0.0


def _engine_error(rule: str) -> WorldError:
    return WorldError("serve/engine", "engine", None, rule)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
