"""A server in a process of its own, for programs: start it, use its address, close it."""

from __future__ import annotations

import json
import subprocess
import sys
from types import TracebackType
from typing import Any

from phalanx.engines.serve.settings import ServeSettings, require_packages, require_servable
from phalanx.engines.serve.wire import encode, error_from_json
from phalanx.errors import WorldError
from phalanx.job import PlanSection

_CLOSE_S = 20.0


class ServerHandle:
    """A running server; also a context manager.

    Attributes:
        url: "http://host:port"; the OpenAI interface is below "/v1".
        sentence: what it can hold and how fast it should be, for people.
        engine: the same as numbers: "kv_tokens", "kv_bytes", "max_running", "rates" and others.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self._process = subprocess.Popen(
            [sys.executable, "-m", "phalanx.engines.serve.front"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # an interrupt is this program's, which then closes it
        )
        try:
            message = self._first_words()
        except BaseException:
            self.close()
            raise
        self.url: str = message["url"]
        self.sentence: str = message["sentence"]
        self.engine: dict[str, Any] = message["engine"]

    def _first_words(self) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(encode(self.settings.to_dict()))
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            rule = f"ended with exit code {self._process.wait()}; its last words are on stderr"
            raise WorldError("serve/engine", "server", None, rule)
        message = json.loads(line)
        if message["kind"] == "failed":
            raise error_from_json(message["error"])
        return message

    def close(self) -> None:
        """End the server and wait for it; open requests get some seconds to end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> ServerHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def start_server(folder: str, *, port: int = 0, **options: Any) -> ServerHandle:
    """Serve a model folder from processes of its own; returns when requests are answered.

    Args:
        folder: model folder as Hugging Face writes it.
        port: 0 takes one that is free.
        options: further fields of `ServeSettings`.

    Raises:
        JobError: what is wrong with the folder, the address or an option.
        WorldError: `serve/engine` when a process ended without a word.
    """
    require_packages()
    options.setdefault("scheduler", PlanSection().serve)
    settings = ServeSettings(folder=str(folder), port=port, **options)
    require_servable(settings)
    return ServerHandle(settings)
