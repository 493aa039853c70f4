"""The front end process: checks what it is told, starts the engine, listens.

`serve` runs it in this process. `python -m phalanx.engines.serve.front` is what `start_server`
runs: settings on standard input, one line on standard output when it listens, end of input ends it.

A signal (interrupt, SIGTERM) drains: /health and new requests are answered with 503, those that run
get `DRAIN_S` to end; a second signal ends at once. When the engine cannot be kept running, 503 is
answered for some seconds more, then the process ends with what was wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import uvicorn

from phalanx.cost.serving import ServeRates
from phalanx.engines.serve.app import create_app
from phalanx.engines.serve.chat import ChatRenderer
from phalanx.engines.serve.client import EngineClient
from phalanx.engines.serve.settings import ServeSettings, require_servable
from phalanx.engines.serve.text import Tokeniser
from phalanx.engines.serve.wire import encode, error_to_json
from phalanx.errors import JobError, PhalanxError
from phalanx.units import format_bytes, format_s

DRAIN_S = 20.0
_PROGRAM_DRAIN_S = 5.0  # when the program that started it ends it
_DOWN_S = 3.0
_FLUSH_S = 5


def listen(settings: ServeSettings) -> socket.socket:
    """A listening socket at the address of the settings.

    Raises:
        JobError: `serve/port` when it is taken or not of this machine.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((settings.host, settings.port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        address = f"{settings.host}:{settings.port}"
        rule = f"cannot be listened on: {(error.strerror or str(error)).lower()}"
        legal = ["port 0 (one that is free)"]
        raise JobError("serve/port", "serve.host and port", address, rule, legal=legal) from None
    return sock


def sentence(settings: ServeSettings, url: str, ready: Mapping[str, Any]) -> str:
    """What a person reads at the start: what fits, and how fast it should be."""
    what_fits = (
        f"{settings.model_name} ({ready['dtype']}) listens at {url}: up to {ready['max_running']} "
        f"requests at once, {ready['max_tokens']} tokens each (prompt and output); KV cache of "
        f"{ready['kv_tokens']} tokens, {format_bytes(ready['kv_bytes'])}, holds "
        f"{ready['kv_tokens'] // ready['max_tokens']} requests of full length"
    )
    return f"{what_fits}; {_forecast(ready)}"


def _forecast(ready: Mapping[str, Any]) -> str:
    """Latencies of requests of middle length, from the rates that the engine measured."""
    rates = ServeRates.from_dict(ready["rates"])
    length, num_running = ready["max_tokens"] // 2, ready["max_running"]
    first_s = rates.prompt_s(length, ready["max_step_tokens"])
    alone_s, full_s = rates.decode_s(1, length), rates.decode_s(num_running, length)
    return (
        f"predicted TTFT {_two_digits(first_s)} for a prompt of {length} tokens, TPOT "
        f"{_two_digits(alone_s)} alone and {_two_digits(full_s)} at {num_running} requests "
        "(from steps measured at the start)"
    )


def _two_digits(seconds: float) -> str:
    return format_s(float(f"{seconds:.2g}"))


class _Server(uvicorn.Server):
    """uvicorn without its way with signals, which closes the address at once."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.signalled = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # signals are the main thread's
            return
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for each in signals:
            loop.add_signal_handler(each, self.handle_exit, each, None)
        try:
            yield
        finally:
            for each in signals:
                loop.remove_signal_handler(each)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.signalled.is_set():
            self.should_exit = self.force_exit = True
        self.signalled.set()


async def serve(
    settings: ServeSettings,
    announce: Callable[[str, str, Mapping[str, Any]], object],
    *,
    until_end_of_input: bool = False,
) -> None:
    """Listen until a signal ends it.

    Args:
        announce: gets the address, the sentence for people and what the engine said of itself,
            once requests are answered.
        until_end_of_input: end with standard input too.

    Raises:
        JobError: as `require_servable` and `listen`, before any process starts; then as
            `EngineClient.start`.
        WorldError: `serve/engine` when the engine ended too often in a row.
    """
    require_servable(settings)
    tokeniser, renderer = Tokeniser(settings.folder), ChatRenderer.from_folder(settings.folder)
    sock = listen(settings)
    try:
        client = await EngineClient.start(settings)
    except BaseException:
        sock.close()
        raise
    host, port = sock.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    config = uvicorn.Config(
        create_app(client, tokeniser, renderer),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_FLUSH_S,
        lifespan="off",
    )
    server = _Server(config)
    running = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        while not server.started and not running.done():
            await asyncio.sleep(0.01)
        announce(url, sentence(settings, url, client.ready), client.ready)
        await _until_end(server, running, client, until_end_of_input)
    finally:
        await client.close()
        server.should_exit = True
        await running


async def _until_end(
    server: _Server, running: asyncio.Task[None], client: EngineClient, until_end_of_input: bool
) -> None:
    """Wait for a reason to end, and let open requests end.

    Raises:
        WorldError: `serve/engine` when the engine is the reason.
    """
    signalled = asyncio.create_task(server.signalled.wait())
    down = asyncio.create_task(client.until_down())
    waits: list[asyncio.Task[Any]] = [running, signalled, down]
    if until_end_of_input:
        waits.append(asyncio.create_task(_end_of_input()))
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if down.done():
            await asyncio.wait((running, signalled), timeout=_DOWN_S)
            raise down.result()
        drain_s = DRAIN_S if signalled.done() else _PROGRAM_DRAIN_S
        draining = asyncio.create_task(client.drain(drain_s))
        waits.append(draining)
        await asyncio.wait((running, draining), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waits[1:]:
            task.cancel()


async def _end_of_input() -> None:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    await reader.read()


def main() -> int:
    """What `start_server` runs."""
    settings = ServeSettings(**json.loads(sys.stdin.readline()))

    def announce(url: str, text: str, engine: Mapping[str, Any]) -> None:
        _tell({"kind": "ready", "url": url, "sentence": text, "engine": engine})

    try:
        asyncio.run(serve(settings, announce, until_end_of_input=True))
    except PhalanxError as error:
        _tell({"kind": "failed", "error": error_to_json(error)})
        return error.exit_code
    return 0


def _tell(message: dict[str, Any]) -> None:
    sys.stdout.buffer.write(encode(message))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
