"""The output of one request: tokens on their way from the engine to who asked for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from phalanx.engines.serve.metrics import RequestTimes
from phalanx.engines.serve.settings import TokenScore
from phalanx.errors import PhalanxError


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
    """The tokens of one request as they come; closing it early cancels the request.

    Args:
        request: its number.
        cancel: gets the number and the reason when the stream is closed.
        times: what is measured of it.
    """

    def __init__(
        self, request: int, cancel: Callable[[int, str], None], times: RequestTimes
    ) -> None:
        self.request, self.times, self._cancel = request, times, cancel
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

    def close(self, reason: str = "cancelled") -> None:
        """Cancel the request unless it has ended; its KV is freed.

        Args:
            reason: "cancelled", or "stop" when its reader found a reason to stop.
        """
        self._cancel(self.request, reason)
