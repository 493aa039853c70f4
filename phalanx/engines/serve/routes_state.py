"""Routes that tell how the server is: models, health, load, metrics, version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse, Response

import phalanx
from phalanx.engines.serve.answers import unknown_model
from phalanx.engines.serve.client import EngineClient


class StateRoutes:
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
            "/v1/models": ("GET", self.models),
            "/v1/models/{name:path}": ("GET", self.model),
            "/health": ("GET", self.health),
            "/ping": ("GET", self.health),
            "/live": ("GET", self.live),
            "/load": ("GET", self.load),
            "/version": ("GET", self.version),
            "/metrics": ("GET", self.metrics),
        }

    async def models(self) -> Response:
        """GET the base model and the adapters that can be asked for by name."""
        return JSONResponse({"object": "list", "data": list(self._models().values())})

    async def model(self, name: str) -> Response:
        """GET one of them."""
        models = self._models()
        if name not in models:
            raise unknown_model(name, models)
        return JSONResponse(models[name])

    def _models(self) -> dict[str, dict[str, Any]]:
        settings = self._client.settings
        base = settings.model_name
        return {
            name: {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "phalanx",
                "root": name,
                "parent": None if name == base else base,
                "max_model_len": settings.max_tokens,
            }
            for name in (base, *self._client.adapters)
        }

    async def health(self) -> Response:
        """GET 200 while the engine's loop makes progress, else 503 with the reason."""
        self._client.require_progress()
        steps = self._client.counters.get("steps", 0)
        return JSONResponse({"status": "ok", "state": self._client.state, "steps": steps})

    async def live(self) -> Response:
        """GET 200 as long as this process answers."""
        return JSONResponse({"status": "ok"})

    async def load(self) -> Response:
        """GET the number of requests that run or wait."""
        return JSONResponse({"server_load": self._client.num_live})

    async def version(self) -> Response:
        """GET the version of Phalanx, and of the weights."""
        versions = {"version": phalanx.__version__, "weight_version": self._client.weight_version}
        return JSONResponse(versions)

    async def metrics(self) -> Response:
        """GET counters, gauges and histograms in the Prometheus text format."""
        metrics = self._client.metrics
        return Response(metrics.text(), media_type=metrics.content_type)
