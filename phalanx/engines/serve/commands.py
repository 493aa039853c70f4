"""What an engine is told apart from requests: weights, adapters, sleep.

It is remembered, so that an engine process that was started again can be brought to where the one
before was. A command has a number; "done" or "refused" answers it. After a restart the same
adapters are loaded from their folders under the versions they had (one that cannot be loaded any
more is dropped, which stderr says), then the folder of the last update under its version, and the
engine sleeps again if it slept. Weights that cannot be restored are an error: the server never
falls back to others.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from typing import Any

from phalanx.engines.serve.wire import error_from_json
from phalanx.errors import PhalanxError

Reply = Mapping[str, Any]


class Commands:
    """The commands of one server.

    Args:
        send: sends a message to the engine.
        adapters: name -> folder, loaded by the first engine process itself.

    Attributes:
        adapters: name -> folder of what is served.
        asleep: level of sleep; 0 when awake.
    """

    def __init__(
        self, send: Callable[[Mapping[str, Any]], None], adapters: Mapping[str, str]
    ) -> None:
        self._send = send
        self.adapters = dict(adapters)
        self.asleep = 0
        self._weights: tuple[str, str] | None = None
        self._fills = dict.fromkeys(adapters, 0)  # last version of each name, unloaded ones too
        self._pending: dict[int, asyncio.Future[Reply]] = {}
        self._last_number = 0

    @property
    def num_pending(self) -> int:
        """Commands without an answer."""
        return len(self._pending)

    async def update_weights(self, folder: str, version: str) -> str:
        """Replace the weights; the version that is served then."""
        reply = await self._ask(kind="update", folder=folder, version=version)
        self._weights = folder, version
        return str(reply["weight_version"])

    async def load_adapter(self, name: str, folder: str) -> str:
        """Load or replace an adapter; its version."""
        fill = self._fills.get(name, -1) + 1
        reply = await self._ask(kind="load_adapter", name=name, folder=folder, version=fill)
        self.adapters[name], self._fills[name] = folder, fill
        return str(reply["adapters"][name])

    async def unload_adapter(self, name: str) -> None:
        """Serve an adapter no more."""
        await self._ask(kind="unload_adapter", name=name)
        self.adapters.pop(name, None)

    async def sleep(self, level: int) -> None:
        """Give memory back; from now on no request may be sent."""
        before, self.asleep = self.asleep, level
        try:
            await self._ask(kind="sleep", level=level)
        except PhalanxError:
            self.asleep = before
            raise

    async def wake(self) -> None:
        """Take the memory again."""
        await self._ask(kind="wake")
        self.asleep = 0

    async def restore(self) -> None:
        """Tell a new engine process what the one before was told.

        Raises:
            PhalanxError: what it found wrong with the weights.
        """
        for name, folder in list(self.adapters.items()):
            fill = self._fills[name]
            try:
                await self._ask(kind="load_adapter", name=name, folder=folder, version=fill)
            except PhalanxError as error:
                if error.code == "serve/engine":
                    raise
                del self.adapters[name]
                text = f"adapter {name!r} is served no more: {error.sentence()}"
                print(text, file=sys.stderr, flush=True)
        if self._weights is not None:
            folder, version = self._weights
            await self._ask(kind="update", folder=folder, version=version)
        if self.asleep:
            await self._ask(kind="sleep", level=self.asleep)

    def hear(self, message: Mapping[str, Any]) -> None:
        """An answer came: "done" or "refused"."""
        pending = self._pending.pop(message["number"])
        if pending.done():
            return  # nobody waits for it any more
        if message["kind"] == "done":
            pending.set_result(message)
        else:
            pending.set_exception(error_from_json(message["error"]))

    def fail(self, error: PhalanxError) -> None:
        """No answer will come."""
        for pending in self._pending.values():
            if not pending.done():
                pending.set_exception(error)
        self._pending.clear()

    async def _ask(self, **message: Any) -> Reply:
        self._last_number += 1
        pending: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._pending[self._last_number] = pending
        self._send({**message, "number": self._last_number})
        return await pending
