"""The front end's side of the engine process: tokens in, tokens out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.engines.serve.settings import Sampling, ServeSettings, TokenScore
from phalanx.engines.serve.wire import encode, error_from_json
from phalanx.errors import JobError, PhalanxError, WorldError

_LINE_BYTES = 1 << 28
_PING_S = 1.0
_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Delta:
    """One output token.

    Attributes:
        reason: "stop" or "length" with the last one, else "".
        weight_version: of the weights that chose it.
        prompt_scores: with the first one, where asked for.
    """

    token: int
    reason: str
    weight_version: str
    score: TokenScore | None = None
    prompt_scores: Sequence[TokenScore] | None = None


class TokenStream:
    """The tokens of one request as they come; closing it early cancels the request."""

    def __init__(self, client: EngineClient, request: int) -> None:
        self._client, self.request = client, request
        self._queue: asyncio.Queue[Delta | PhalanxError] = asyncio.Queue()

    def put(self, item: Delta | PhalanxError) -> None:
        """Called by the client."""
        self._queue.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while True:
            item = await self._queue.get()
            if isinstance(item, PhalanxError):
                raise item
            yield item
            if item.reason:
                return

    def close(self) -> None:
        """Cancel the request unless it has ended; its KV is freed."""
        self._client.cancel(self.request)


class EngineClient:
    """A running engine process.

    Attributes:
        ready: what the engine said when it was ready.
        counters: what it said last.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.ready: dict[str, Any] = {}
        self.counters: dict[str, int] = {}
        self.error: PhalanxError | None = None
        self._streams: dict[int, TokenStream] = {}
        self._updates: list[asyncio.Future[str]] = []
        self._next_request = 0
        self._heard_s = 0.0
        self._is_pinged = False
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, settings: ServeSettings) -> EngineClient:
        """Start the process and wait until its model is loaded.

        Raises:
            JobError, PlanError: what the engine found wrong with the settings or the folder.
            WorldError: `serve/engine` when it ended without a word.
        """
        client = cls(settings)
        ours, theirs = socket.socketpair()
        try:
            client._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "phalanx.engines.serve.core", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # an interrupt is the front end's; the core sees its end
            )
        finally:
            theirs.close()
        client._reader, client._writer = await asyncio.open_connection(sock=ours, limit=_LINE_BYTES)
        client._send(settings.to_dict())
        try:
            await client._await_ready()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                client._process.kill()  # while it loads it does not look at its socket
            await client.close()
            raise
        client._tasks = [asyncio.create_task(client._read()), asyncio.create_task(client._ping())]
        return client

    async def _await_ready(self) -> None:
        line = await self._reader.readline()
        if not line:
            raise await self._death()
        message = json.loads(line)
        if message["kind"] == "failed":
            raise error_from_json(message["error"])
        self.ready, self._heard_s = message, time.monotonic()

    # ---- requests --------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def require_room(self, num_requests: int) -> None:
        """Raise `serve/busy` when the queue has no room for so many, `serve/engine` if it ended."""
        if self.error is not None:
            raise self.error
        limit = self.settings.max_running + self.settings.max_queued
        if self.num_live + num_requests > limit:
            rule = f"the queue is full: at most {limit} requests run or wait; try again later"
            raise WorldError("serve/busy", "requests", self.num_live, rule)

    def require_length(self, prompt_len: int, max_new: int) -> None:
        """Raise `serve/request` for what cannot fit into the context, naming the numbers."""
        limit = self.settings.max_tokens
        if prompt_len < 1:
            raise JobError("serve/request", "prompt", prompt_len, "must have at least one token")
        if prompt_len + max_new > limit:
            where = "prompt tokens + max_tokens"
            rule = f"at most {limit} tokens fit into the context of this server"
            value = f"{prompt_len} + {max_new}"
            legal = [f"max_tokens <= {limit - prompt_len}"] if prompt_len < limit else []
            raise JobError("serve/request", where, value, rule, legal=legal)

    def submit(self, tokens: Sequence[int], sampling: Sampling) -> TokenStream:
        """Start a request.

        Raises:
            JobError: `serve/request` for a prompt that cannot be served.
            WorldError: `serve/busy`, `serve/engine`.
        """
        self.require_room(1)
        self.require_length(len(tokens), sampling.max_new)
        size = self.ready["vocab_size"]
        for token in tokens:
            if not 0 <= token < size:
                rule = f"is no token id of this model, which has {size}"
                raise JobError("serve/request", "prompt", token, rule, legal=[0, size - 1])
        self._next_request += 1
        stream = self._streams[self._next_request] = TokenStream(self, self._next_request)
        self._send(
            {
                "kind": "add",
                "request": stream.request,
                "tokens": list(tokens),
                "sampling": asdict(sampling),
            }
        )
        return stream

    def cancel(self, request: int) -> None:
        """Forget a request; nothing happens when it has ended."""
        if self._streams.pop(request, None) is not None and self.error is None:
            self._send({"kind": "cancel", "request": request})

    async def update_weights(self, folder: str, version: str) -> str:
        """Replace the weights in place between two steps; the version that is served then.

        Raises:
            JobError: what is wrong with the folder; the old weights stay.
        """
        self.require_room(0)
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._updates.append(done)
        self._send({"kind": "update", "folder": folder, "version": version})
        return await done

    # ---- health ----------------------------------------------------------------------------------

    def require_progress(self) -> None:
        """Raise `serve/engine` when the engine ended or its loop stands still."""
        if self.error is not None:
            raise self.error
        silent_s = time.monotonic() - self._heard_s
        if silent_s > self.settings.stall_s:
            rule = f"the engine's loop must answer within {self.settings.stall_s:g} s"
            raise WorldError("serve/engine", "seconds without progress", f"{silent_s:.1f}", rule)

    async def close(self) -> None:
        """End the process; open requests get an error."""
        for task in self._tasks:
            task.cancel()
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        try:
            await asyncio.wait_for(self._process.wait(), _CLOSE_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._fail(WorldError("serve/engine", "engine", None, "was stopped"))

    # ---- inside ----------------------------------------------------------------------------------

    def _send(self, message: Mapping[str, Any]) -> None:
        self._writer.write(encode(message))

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(_PING_S)
            if not self._is_pinged:
                self._is_pinged = True
                self._send({"kind": "ping"})

    async def _read(self) -> None:
        while line := await self._reader.readline():
            message = json.loads(line)
            self._heard_s = time.monotonic()
            kind = message["kind"]
            if kind == "step":
                self.counters = message["counters"]
                self._deliver(message)
            elif kind == "pong":
                self._is_pinged, self.counters = False, message["counters"]
            elif kind == "updated":
                self._updates.pop(0).set_result(message["weight_version"])
            elif kind == "refused":
                self._updates.pop(0).set_exception(error_from_json(message["error"]))
        self._fail(await self._death())

    def _deliver(self, message: Mapping[str, Any]) -> None:
        version = message["weight_version"]
        for request, token, score, reason, prompt_scores in message["outputs"]:
            stream = self._streams.get(request)
            if stream is None:
                continue  # cancelled meanwhile
            if reason:
                del self._streams[request]
            stream.put(Delta(token, reason, version, score, prompt_scores))

    async def _death(self) -> WorldError:
        code = await self._process.wait()
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        rule = f"the engine process ended with {cause}; its last words are on stderr"
        return WorldError("serve/engine", "engine", None, rule)

    def _fail(self, error: PhalanxError) -> None:
        self.error = error
        for stream in self._streams.values():
            stream.put(error)
        self._streams.clear()
        for update in self._updates:
            if not update.done():
                update.set_exception(error)
