"""The HTTP application: routes, request ids, errors in one form."""

from __future__ import annotations

import string
import uuid
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from phalanx.engines.serve.answers import error_body, error_response
from phalanx.engines.serve.chat import ChatRenderer
from phalanx.engines.serve.client import EngineClient
from phalanx.engines.serve.routes_admin import AdminRoutes
from phalanx.engines.serve.routes_state import StateRoutes
from phalanx.engines.serve.routes_text import TextRoutes
from phalanx.engines.serve.text import Tokeniser
from phalanx.errors import JobError, PhalanxError, nearest_names

_ID_CHARACTERS = frozenset((string.ascii_letters + string.digits + "-_.:").encode())
_MAX_ID_BYTES = 128


def create_app(client: EngineClient, tokeniser: Tokeniser, renderer: ChatRenderer) -> FastAPI:
    """The application in front of a running engine, with what its model folder says of text."""
    app = FastAPI(title="Phalanx", docs_url=None, redoc_url=None, openapi_url=None)
    routes = StateRoutes(client).table | TextRoutes(client, tokeniser, renderer).table
    if client.settings.admin:
        routes |= AdminRoutes(client).table
    for path, (method, handler) in routes.items():
        app.add_api_route(path, handler, methods=[method])
    app.state.paths = tuple(routes)
    app.add_exception_handler(PhalanxError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(Exception, _answer_failure)
    app.add_middleware(RequestIds)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PhalanxError)
    return error_response(error)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """No such route, or not by this method."""
    assert isinstance(error, HTTPException)
    path, legal, rule = request.url.path[:200], [], str(error.detail).lower()
    if error.status_code == 404:
        rule, legal = "no such route", nearest_names(path, request.app.state.paths)
    told = JobError("serve/request", f"{request.method} {path}", None, rule, legal=legal)
    body = error_body(told.sentence(), told.code, error.status_code)
    return JSONResponse(body, error.status_code, dict(error.headers or {}))


async def _answer_failure(request: Request, error: Exception) -> Response:
    """A mistake of ours: the log has the traceback."""
    return JSONResponse(error_body("the server failed; its log says why", "serve/engine", 500), 500)


class RequestIds:
    """Gives every request an id, the client's own where it sends a plain one, and tells it back.

    Args:
        app: the application behind.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        is_plain = 0 < len(given) <= _MAX_ID_BYTES and _ID_CHARACTERS.issuperset(given)
        request_id = given.decode() if is_plain else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                header = (b"x-request-id", request_id.encode())
                message = message | {"headers": [*message["headers"], header]}
            await send(message)

        await self._app(scope, receive, send_with_id)
