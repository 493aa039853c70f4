"""The HTTP routes: completions, models, health, metrics, weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from phalanx.engines.serve.client import EngineClient
from phalanx.engines.serve.generation import Choice, Piece, join
from phalanx.engines.serve.protocol import (
    Completion,
    completion_head,
    error_body,
    parse_completion,
    usage,
)
from phalanx.engines.serve.text import Tokeniser
from phalanx.errors import JobError, PhalanxError

MAX_BODY_BYTES = 32 << 20
_STATUS = {"serve/busy": 429, "serve/engine": 503}
_GAUGES = ("running", "live", "free_blocks", "num_blocks")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


def create_app(client: EngineClient, tokeniser: Tokeniser) -> FastAPI:
    """The application in front of a running engine."""
    app = FastAPI(title="Phalanx", docs_url=None, redoc_url=None, openapi_url=None)
    front = _Front(client, tokeniser)
    app.add_exception_handler(PhalanxError, _answer_error)
    app.add_api_route("/v1/completions", front.completions, methods=["POST"])
    app.add_api_route("/v1/models", front.models, methods=["GET"])
    app.add_api_route("/health", front.health, methods=["GET"])
    app.add_api_route("/metrics", front.metrics, methods=["GET"])
    if client.settings.admin:
        app.add_api_route("/update_weights", front.update_weights, methods=["POST"])
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PhalanxError)
    status = _STATUS.get(error.code, 400 if isinstance(error, JobError) else 500)
    kind = "invalid_request_error" if status == 400 else "server_error"
    headers = {"Retry-After": "1"} if status == 429 else {}
    return JSONResponse(error_body(error.sentence(), error.code, kind), status, headers)


class _Front:
    """The handlers. A handler's docstring is its contract."""

    def __init__(self, client: EngineClient, tokeniser: Tokeniser) -> None:
        self._client, self._tokeniser = client, tokeniser
        self._name = client.settings.model_name

    async def completions(self, request: Request) -> Response:
        """POST a completion; an answer, or server-sent events with `stream`."""
        asked = parse_completion(await _json(request), self._name)
        if asked.stops and not self._tokeniser.has_text:
            rule = "needs a tokenizer.json in the model folder; use stop_token_ids"
            raise JobError("serve/request", "stop", None, rule)
        # encoding long texts takes long enough to hold up the streams of others
        prompts = [
            await asyncio.to_thread(self._tokeniser.encode, each)
            if isinstance(each, str)
            else list(each)
            for each in asked.prompts
        ]
        choices = self._start(asked, prompts)
        head = completion_head(self._name, self._client.ready["weight_version"])
        if asked.stream:
            return _EventStream(_stream(asked, choices, head), choices)
        gathered = asyncio.ensure_future(_collect(choices))
        if not await _unless_disconnected(request.receive, gathered):
            _close(choices)
            return Response(status_code=499)  # nobody reads it
        texts = gathered.result()
        head["system_fingerprint"] = texts[-1].weight_version
        table = [choice.to_json(text) for choice, text in zip(choices, texts)]
        return JSONResponse(head | {"choices": table, "usage": _usage(asked, choices)})

    def _start(self, asked: Completion, prompts: Sequence[list[int]]) -> list[Choice]:
        """All choices of a request, or none of them."""
        self._client.require_room(len(prompts) * asked.num_each)
        for prompt in prompts:
            self._client.require_length(len(prompt), asked.sampling.max_new)
        choices: list[Choice] = []
        try:
            for prompt in prompts:
                for _ in range(asked.num_each):
                    at = len(choices)
                    choices.append(Choice(at, asked, prompt, self._client, self._tokeniser))
        except PhalanxError:
            _close(choices)
            raise
        return choices

    async def models(self) -> Response:
        """GET the one model that is served."""
        ready = self._client.ready
        model = {
            "id": self._name,
            "object": "model",
            "created": 0,
            "owned_by": "phalanx",
            "max_model_len": ready["max_tokens"],
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self) -> Response:
        """GET 200 while the engine's loop makes progress, else 503."""
        self._client.require_progress()
        counters = self._client.counters
        return JSONResponse({"status": "ok", "steps": counters.get("steps", 0)})

    async def metrics(self) -> Response:
        """GET counters in the Prometheus text format."""
        lines = []
        for name, value in (self._client.counters | {"open": self._client.num_live}).items():
            is_gauge = name in (*_GAUGES, "open")
            metric = f"phalanx_{name}" if is_gauge else f"phalanx_{name}_total"
            lines += [f"# TYPE {metric} {'gauge' if is_gauge else 'counter'}", f"{metric} {value}"]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def update_weights(self, request: Request) -> Response:
        """POST {"folder", "version"}: replace the weights in place, between two steps."""
        body = await _json(request)
        for name in ("folder", "version"):
            if not isinstance(body, dict) or not isinstance(body.get(name), str):
                raise JobError("serve/request", name, None, "must be given as a text")
        version = await self._client.update_weights(body["folder"], body["version"])
        self._client.ready["weight_version"] = version
        return JSONResponse({"weight_version": version})


async def _json(request: Request) -> Any:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            rule = f"must have at most {MAX_BODY_BYTES} bytes"
            raise JobError("serve/request", "body", f"over {MAX_BODY_BYTES}", rule)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise JobError("serve/request", "body", None, f"is not valid JSON: {error}") from None


def _close(choices: Sequence[Choice]) -> None:
    for choice in choices:
        choice.close()


def _usage(asked: Completion, choices: Sequence[Choice]) -> dict[str, int]:
    prompts = sum(len(choice.prompt) for choice in choices[:: asked.num_each])
    return usage(prompts, sum(choice.num_output for choice in choices))


async def _collect(choices: Sequence[Choice]) -> list[Piece]:
    async def whole(choice: Choice) -> Piece:
        return join([piece async for piece in choice.pieces()])

    try:
        return await asyncio.gather(*map(whole, choices))
    finally:
        _close(choices)


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


async def _stream(
    asked: Completion, choices: Sequence[Choice], head: dict[str, Any]
) -> AsyncIterator[bytes]:
    """Server-sent events of all choices as their pieces come."""
    queue: asyncio.Queue[dict[str, Any] | PhalanxError | None] = asyncio.Queue()

    async def feed(choice: Choice) -> None:
        try:
            async for piece in choice.pieces():
                own = {
                    "choices": [choice.to_json(piece)],
                    "system_fingerprint": piece.weight_version,
                }
                await queue.put(head | own)
        except PhalanxError as error:
            await queue.put(error)
        await queue.put(None)

    tasks = [asyncio.create_task(feed(choice)) for choice in choices]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, PhalanxError):
                yield _event(error_body(item.sentence(), item.code, "server_error"))
                return
            else:
                yield _event(item)
        if asked.include_usage:
            yield _event(head | {"choices": [], "usage": _usage(asked, choices)})
        yield b"data: [DONE]\n\n"
    finally:
        for task in tasks:
            task.cancel()
        _close(choices)


def _event(table: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(table).encode() + b"\n\n"


class _EventStream(Response):
    """Server-sent events that end with the connection: a client that goes cancels its requests."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], choices: Sequence[Choice]) -> None:
        self._events, self._choices = events, choices
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        sending = asyncio.ensure_future(self._send_all(send, start))
        try:
            if await _unless_disconnected(receive, sending):
                sending.result()
        finally:
            _close(self._choices)

    async def _send_all(self, send: Any, start: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the connection broke: the requests are cancelled
            await send(start)
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
