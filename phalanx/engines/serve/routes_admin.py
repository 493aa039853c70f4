"""Routes that change what is served; they exist with the setting `admin` only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from phalanx.engines.serve.answers import read_json
from phalanx.engines.serve.client import EngineClient
from phalanx.engines.serve.parameters import Table, boolean, read, text, whole, wrong

_UPDATE: Table = {"folder": (text, None), "version": (text, None)}
_LOAD: Table = {"lora_name": (text, None), "lora_path": (text, None)}
_UNLOAD: Table = {"lora_name": (text, None)}
_SLEEP: Table = {"level": (whole(1, 2), 1), "abort": (boolean, False)}


class AdminRoutes:
    """The handlers. A handler's docstring is its contract.

    Args:
        client: of the engine.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    @property
    def table(self) -> dict[str, tuple[str, Callable[..., Any]]]:
        """Path -> method and handler."""
        return {
            "/update_weights": ("POST", self.update_weights),
            "/v1/load_lora_adapter": ("POST", self.load_adapter),
            "/v1/unload_lora_adapter": ("POST", self.unload_adapter),
            "/sleep": ("POST", self.sleep),
            "/wake_up": ("POST", self.wake_up),
        }

    async def update_weights(self, request: Request) -> Response:
        """POST {"folder", "version"}: replace the weights in place, between two steps."""
        body = await _texts(request, _UPDATE)
        version = await self._client.update_weights(body["folder"], body["version"])
        return JSONResponse({"weight_version": version})

    async def load_adapter(self, request: Request) -> Response:
        """POST {"lora_name", "lora_path"}: serve an adapter under this name, or load it anew."""
        body = await _texts(request, _LOAD)
        name = body["lora_name"]
        if name == self._client.settings.model_name:
            raise wrong("lora_name", name, "is the name of the base model")
        version = await self._client.load_adapter(name, body["lora_path"])
        return JSONResponse({"status": "loaded", "lora_name": name, "weight_version": version})

    async def unload_adapter(self, request: Request) -> Response:
        """POST {"lora_name"}: new requests for it are refused, running ones go on to their end."""
        body = await _texts(request, _UNLOAD)
        await self._client.unload_adapter(body["lora_name"])
        return JSONResponse({"status": "unloaded", "lora_name": body["lora_name"]})

    async def sleep(self, request: Request) -> Response:
        """POST {"level"}, or ?level=1: give the cache's memory back; at 2 the weights' too."""
        given = dict(request.query_params)
        body: Any = await read_json(request) if await request.body() else {}
        if given:
            body = {name: _QUERY.get(value, value) for name, value in given.items()}
        values = read(body, _SLEEP)
        await self._client.sleep(values["level"], values["abort"])
        return JSONResponse({"status": "asleep", "level": values["level"]})

    async def wake_up(self) -> Response:
        """POST: take the memory again, read what has to be read, and serve."""
        await self._client.wake()
        return JSONResponse({"status": "awake"})


_QUERY: dict[str, Any] = {"1": 1, "2": 2, "true": True, "false": False}


async def _texts(request: Request, table: Table) -> dict[str, str]:
    """A body in which every parameter must be given."""
    values = read(await read_json(request), table)
    for name, value in values.items():
        if not value:
            raise wrong(name, value, "must be given as a text")
    return values
