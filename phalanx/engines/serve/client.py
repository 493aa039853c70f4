"""The front end's side of the engine process: tokens in, tokens out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from phalanx.engines.serve.commands import Commands
from phalanx.engines.serve.metrics import RequestTimes, ServeMetrics
from phalanx.engines.serve.settings import Sampling, ServeSettings
from phalanx.engines.serve.stream import Delta, TokenStream
from phalanx.engines.serve.supervisor import Supervisor
from phalanx.engines.serve.wire import error_from_json
from phalanx.errors import JobError, PhalanxError, WorldError, nearest_names

__all__ = ["Delta", "EngineClient", "TokenStream"]

_DRAIN_TICK_S = 0.02


class EngineClient:
    """A running engine process, started again when it ends.

    Attributes:
        counters: what the engine said last of itself.
        metrics: what a monitoring system asks for.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.counters: dict[str, int] = {}
        self.metrics = ServeMetrics()
        self._supervisor = Supervisor(settings, self, self.metrics.restarts.inc)
        self._commands = Commands(self._supervisor.send, settings.adapters)
        self._streams: dict[int, TokenStream] = {}
        self._computed: set[int] = set()  # requests of the last step
        self._next_request = 0
        self._is_draining = False
        is_up = self._supervisor.complaint
        self.metrics.is_up.set_function(lambda: float(is_up() is None))

    @classmethod
    async def start(cls, settings: ServeSettings) -> EngineClient:
        """Start the process and wait until its model is loaded.

        Raises:
            JobError, PlanError: what the engine found wrong with the settings or the folder.
            WorldError: `serve/engine` when it ended without a word.
        """
        client = cls(settings)
        await client._supervisor.start()
        return client

    # ---- what it is ------------------------------------------------------------------------------

    @property
    def ready(self) -> dict[str, Any]:
        """What the engine said when it was ready; versions are kept up to date."""
        return self._supervisor.ready

    @property
    def state(self) -> str:
        """ "starting", "ready", "asleep", "draining" or "down" (for ever)."""
        if self._is_draining and self._supervisor.state != "down":
            return "draining"
        return "asleep" if self.is_asleep else self._supervisor.state

    @property
    def is_asleep(self) -> bool:
        """Whether the engine sleeps or is about to."""
        return self._supervisor.state == "ready" and self._commands.asleep > 0

    @property
    def adapters(self) -> dict[str, str]:
        """Name -> folder of the adapters that are served."""
        return self._commands.adapters

    @property
    def weight_version(self) -> str:
        """Of the base."""
        return self.ready["weight_version"]

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def has_work(self) -> bool:
        """Whether the engine could compute something now."""
        return bool(self._streams) and not self._commands.num_pending and not self.is_asleep

    # ---- requests --------------------------------------------------------------------------------

    def require_room(self, num_requests: int) -> None:
        """Raise what keeps so many further requests from being accepted.

        Raises:
            WorldError: `serve/engine` while the server drains or its engine makes no progress,
                `serve/asleep`, `serve/busy` when the queue has no room.
        """
        if self._is_draining:
            rule = "is being stopped and takes no new requests"
            self._refuse(WorldError("serve/engine", "server", None, rule))
        if (complaint := self._supervisor.complaint()) is not None:
            self._refuse(complaint)
        if self.is_asleep:
            rule = "sleeps; wake it first"
            self._refuse(WorldError("serve/asleep", "engine", None, rule))
        limit = self.settings.max_running + self.settings.max_queued
        if self.num_live + num_requests > limit:
            rule = f"the queue is full: at most {limit} requests run or wait; try again later"
            self._refuse(WorldError("serve/busy", "requests", self.num_live, rule))

    def require_length(self, prompt_len: int, max_new: int) -> None:
        """Raise `serve/request` for what cannot fit into the context, naming the numbers."""
        limit = self.settings.max_tokens
        if prompt_len < 1:
            rule = "must have at least one token"
            self._refuse(JobError("serve/request", "prompt", prompt_len, rule))
        if prompt_len + max_new > limit:
            where = "prompt tokens + max_tokens"
            rule = f"at most {limit} tokens fit into the context of this server"
            value = f"{prompt_len} + {max_new}"
            legal = [f"max_tokens <= {limit - prompt_len}"] if prompt_len < limit else []
            self._refuse(JobError("serve/request", where, value, rule, legal=legal))

    def submit(self, tokens: Sequence[int], sampling: Sampling, adapter: str = "") -> TokenStream:
        """Start a request.

        Args:
            adapter: name of one of `adapters`; "" for the base.

        Raises:
            JobError: `serve/request` for a prompt that cannot be served, `serve/adapter`.
            WorldError: as `require_room`.
        """
        self.require_room(1)
        self.require_length(len(tokens), sampling.max_new)
        size = self.ready["vocab_size"]
        for token in tokens:
            if not 0 <= token < size:
                rule = f"is no token id of this model, which has {size}"
                self._refuse(JobError("serve/request", "prompt", token, rule, legal=[0, size - 1]))
        if adapter and adapter not in self.adapters:
            legal = nearest_names(adapter, self.adapters)
            rule = "no such adapter is loaded"
            self._refuse(JobError("serve/adapter", "adapter", repr(adapter), rule, legal=legal))
        self._next_request += 1
        stream = self._streams[self._next_request] = TokenStream(
            self._next_request, self.cancel, RequestTimes(self.metrics)
        )
        self._supervisor.send(
            {
                "kind": "add",
                "request": stream.request,
                "tokens": list(tokens),
                "sampling": asdict(sampling),
                "adapter": adapter,
            }
        )
        return stream

    def cancel(self, request: int, reason: str = "cancelled") -> None:
        """Forget a request; nothing happens when it has ended."""
        if (stream := self._streams.pop(request, None)) is not None:
            stream.times.end(reason)
            self._supervisor.send({"kind": "cancel", "request": request})

    def _refuse(self, error: PhalanxError) -> None:
        self.metrics.refused.labels(error.code).inc()
        raise error

    # ---- commands --------------------------------------------------------------------------------

    async def update_weights(self, folder: str, version: str) -> str:
        """Replace the weights in place between two steps; the version that is served then.

        Raises:
            JobError: what is wrong with the folder; the old weights stay.
        """
        self._require_engine()
        return await self._commands.update_weights(folder, version)

    async def load_adapter(self, name: str, folder: str) -> str:
        """Load an adapter, or replace its weights, between two steps; its version.

        Raises:
            JobError: `serve/adapter` and what else is wrong with the folder.
        """
        self._require_engine()
        return await self._commands.load_adapter(name, folder)

    async def unload_adapter(self, name: str) -> None:
        """Accept no more requests for an adapter; those that run with it run to their end.

        Raises:
            JobError: `serve/adapter` for one that is not loaded.
        """
        self._require_engine()
        await self._commands.unload_adapter(name)

    async def sleep(self, level: int, abort: bool = False) -> None:
        """Give memory back: the KV cache (1), or weights too (2).

        Args:
            abort: open requests end with an error; otherwise they keep the engine awake.

        Raises:
            WorldError: `serve/asleep` when requests are open.
        """
        self._require_engine()
        if self._streams and not abort:
            rule = "run or wait; end them or let them end first"
            raise WorldError("serve/asleep", "requests", self.num_live, rule)
        for stream in list(self._streams.values()):
            self.cancel(stream.request, "error")
            rule = "was ended because the engine was sent to sleep"
            stream.put(WorldError("serve/asleep", "request", None, rule))
        await self._commands.sleep(level)

    async def wake(self) -> None:
        """Take the memory again; requests are served from then on."""
        self._require_engine()
        await self._commands.wake()

    def _require_engine(self) -> None:
        if (complaint := self._supervisor.complaint()) is not None:
            raise complaint

    # ---- health and the end ----------------------------------------------------------------------

    def require_progress(self) -> None:
        """Raise `serve/engine` unless the engine makes progress and the server stays."""
        if self._is_draining:
            raise WorldError("serve/engine", "server", None, "is being stopped")
        self._require_engine()

    async def until_down(self) -> PhalanxError:
        """Wait until no engine process will be started any more; why."""
        await self._supervisor.down.wait()
        complaint = self._supervisor.complaint()
        assert complaint is not None
        return complaint

    async def drain(self, seconds: float) -> None:
        """Take no new requests and wait until the open ones have ended, at most `seconds`."""
        self._is_draining = True
        self._supervisor.may_restart = False
        end_s = time.monotonic() + seconds
        while self._streams and time.monotonic() < end_s:
            await asyncio.sleep(_DRAIN_TICK_S)

    async def close(self) -> None:
        """End the process; open requests get an error."""
        self._is_draining = True
        self._fail_all(WorldError("serve/engine", "engine", None, "was stopped"))
        await self._supervisor.close()

    # ---- what the supervisor calls ---------------------------------------------------------------

    def hear(self, message: Mapping[str, Any]) -> None:
        """A message of the engine."""
        kind = message["kind"]
        if kind == "step":
            self._deliver(message)
        elif kind == "rejected":
            self._end(message["request"], error_from_json(message["error"]))
        elif kind in ("done", "refused"):
            if kind == "done":
                self.ready["weight_version"] = message["weight_version"]
                self.ready["adapters"] = message["adapters"]
            self._commands.hear(message)
        if message.get("counters"):
            self.counters = message["counters"]
            self._computed &= self._streams.keys()
            self.metrics.absorb(self.counters, len(self._computed), self.num_live)

    def lose(self, error: PhalanxError) -> None:
        """The engine process is gone, and all that it held."""
        self._fail_all(error)
        self.counters = {}
        self.metrics.new_engine()

    async def restore(self) -> None:
        """Bring a new engine process to where the old one was."""
        await self._commands.restore()

    # ---- inside ----------------------------------------------------------------------------------

    def _deliver(self, message: Mapping[str, Any]) -> None:
        now_s = time.monotonic()
        self._computed = set(message["requests"])
        for request in self._computed & self._streams.keys():
            self._streams[request].times.start(now_s - message["step_s"])
        for request, token, score, reason, prompt_scores, version in message["outputs"]:
            stream = self._streams.get(request)
            if stream is None:
                continue  # cancelled meanwhile
            stream.times.token(now_s)
            if reason:
                del self._streams[request]
                stream.times.end(reason)
                self._supervisor.num_in_a_row = 0
            stream.put(Delta(token, reason, version, score, prompt_scores))

    def _end(self, request: int, error: PhalanxError) -> None:
        if (stream := self._streams.pop(request, None)) is not None:
            stream.times.end("error")
            stream.put(error)

    def _fail_all(self, error: PhalanxError) -> None:
        for request in list(self._streams):
            self._end(request, error)
        self._computed.clear()
        self._commands.fail(error)
        self.metrics.absorb(self.counters, 0, 0)
