"""One engine process and the front end's end of the socket to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

from phalanx.engines.launch import KERNEL_CACHE, WAITING
from phalanx.engines.serve.settings import ServeSettings
from phalanx.engines.serve.wire import MAX_LINE_BYTES, encode, next_message
from phalanx.errors import WorldError

_CORE = "phalanx.engines.serve.core"
_END_S = 5.0


class CoreProcess:
    """A process of `core`, which was sent its settings. Made by `start`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls, settings: ServeSettings) -> CoreProcess:
        """Start a process; "ready" or "failed" is what it says first.

        Raises:
            WorldError: `serve/engine` when the machine has no room for a process.
        """
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _CORE, str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # standard output is the front end's
                start_new_session=True,  # an interrupt is the front end's; the core sees its end
                env=WAITING | KERNEL_CACHE | os.environ,
            )
        except OSError as error:
            ours.close()
            rule = f"no process can be started: {error.strerror or error}"
            raise WorldError("serve/engine", "engine", None, rule) from None
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
        writer.write(encode(settings.to_dict()))
        return cls(process, reader, writer)

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message; nothing happens when the process has ended."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def receive(self) -> dict[str, Any] | None:
        """The next message; None when the process closed its end.

        Raises:
            WorldError: `serve/engine` for what is no message.
        """
        return await next_message(self._reader)

    def kill(self) -> None:
        """End it now, and what it started."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self, grace_s: float = _END_S) -> None:
        """Close the socket, which ends it; kill it if that takes longer than `grace_s`."""
        self._writer.close()
        await self._wait(grace_s)
        self._writer.transport.abort()  # what it was not sent yet, nobody will read

    async def death(self) -> WorldError:
        """How it ended: `serve/engine`."""
        code = await self._wait(_END_S)
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        rule = f"the engine process ended with {cause}; its last words are on stderr"
        return WorldError("serve/engine", "engine", None, rule)

    async def _wait(self, seconds: float) -> int:
        try:
            async with asyncio.timeout(seconds):
                return await self._process.wait()
        except TimeoutError:
            self.kill()
            return await self._process.wait()
