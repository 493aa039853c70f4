"""From a generation to an HTTP response: at once or as events, errors, clients that go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from phalanx.engines.serve.forms import Form
from phalanx.engines.serve.generation import Generation
from phalanx.engines.serve.parameters import refuse_constant, wrong
from phalanx.errors import JobError, PhalanxError, WorldError, shown

MAX_BODY_BYTES = 32 << 20
_CLIENT_GONE = 499  # nobody reads it
_STATUS = {"serve/busy": 429, "serve/engine": 503, "serve/asleep": 503}
_RETRY_S = {429: "1", 503: "1"}
_KIND = {404: "not_found_error", 405: "invalid_request_error", 429: "rate_limit_error"}
_to_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode  # made once
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class UnknownModelError(JobError):
    """A model that is not served here, which the interface answers with 404."""


def unknown_model(model: str, served: Iterable[str]) -> UnknownModelError:
    """The error, with what could be asked for."""
    rule = "is not served here"
    return UnknownModelError("serve/request", "model", shown(model), rule, legal=served)


def status_of(error: PhalanxError) -> int:
    """400 for what a client can mend, 429 and 503 for what time mends, 500 for the rest."""
    if isinstance(error, UnknownModelError):
        return 404
    return _STATUS.get(error.code, 500 if isinstance(error, WorldError) else 400)


def error_body(message: str, code: str, status: int, parameter: str | None = None) -> dict:
    """An error as the official client reads it."""
    kind = _KIND.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": parameter, "code": code}}


def error_response(error: PhalanxError) -> JSONResponse:
    """The response of a request that was refused."""
    status = status_of(error)
    headers = {"Retry-After": _RETRY_S[status]} if status in _RETRY_S else None
    return JSONResponse(_body_of(error), status, headers)


def _body_of(error: PhalanxError) -> dict:
    status = status_of(error)
    parameter = error.where if status in (400, 404) else None
    parameter = parameter and parameter.encode("ascii", "backslashreplace").decode()
    return error_body(error.sentence(), error.code, status, parameter)


async def read_json(request: Request) -> Any:
    """The body of a request.

    Raises:
        JobError: `serve/request` for one that is too long or no JSON.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            rule = f"must have at most {MAX_BODY_BYTES} bytes"
            raise JobError("serve/request", "body", f"over {MAX_BODY_BYTES}", rule)
    try:
        return json.loads(body, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise wrong("body", None, f"is not valid JSON: {error}") from None


async def answer(request: Request, generation: Generation, form: Form) -> Response:
    """The answer of a generation, which ends with its client."""
    if generation.asked.stream:
        return EventStream(_events(generation, form), generation.close)
    work = asyncio.ensure_future(generation.whole())
    if not await _unless_disconnected(request.receive, work):
        generation.close()
        return Response(status_code=_CLIENT_GONE)
    return JSONResponse(form.whole(generation, work.result()))


async def _events(generation: Generation, form: Form) -> AsyncIterator[bytes]:
    """Server-sent events of all choices as their pieces come."""
    has_begun = False
    try:
        async for choice, piece in generation.parts():
            for table in form.part(choice, piece):
                yield _event(table)
                has_begun = True
    except PhalanxError as error:
        if not has_begun:
            raise
        yield _event(_body_of(error))
        return
    if generation.asked.include_usage:
        yield _event(form.last(generation))
    yield b"data: [DONE]\n\n"


def _event(table: dict[str, Any]) -> bytes:
    return b"data: " + _to_json(table).encode() + b"\n\n"


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless_disconnected(receive: Receive, work: asyncio.Future[Any]) -> bool:
    """Wait for `work`, which is cancelled when the client goes; whether it has ended."""
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        gone.cancel()
        work.cancel()  # no effect on what has ended


class EventStream(Response):
    """Server-sent events that end with the connection.

    The first event decides the status: an error before it is an ordinary error response.

    Args:
        events: the lines of the stream.
        close: called when the stream or its client has ended.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        self._events, self._close = events, close
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the stream."""
        sending = asyncio.ensure_future(self._send_all(scope, receive, send))
        try:
            if await _unless_disconnected(receive, sending):
                sending.result()
        finally:
            self._close()

    async def _send_all(self, scope: Any, receive: Any, send: Any) -> None:
        has_begun = False
        try:
            async for event in self._events:
                if not has_begun:
                    await send(
                        {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                    )
                    has_begun = True
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except PhalanxError as error:  # only before the first event
            await error_response(error)(scope, receive, send)
        except OSError:  # the connection broke: the requests are cancelled
            return
