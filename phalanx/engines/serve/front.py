"""The front end process: checks what it is told, starts the engine, listens.

`serve` runs it in this process. `python -m phalanx.engines.serve.front` is what `start_server`
runs: settings on standard input, one line on standard output when it listens, end of input ends it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn

from phalanx.engines.serve.app import create_app
from phalanx.engines.serve.client import EngineClient
from phalanx.engines.serve.settings import ServeSettings, require_servable
from phalanx.engines.serve.text import Tokeniser
from phalanx.engines.serve.wire import encode, error_to_json
from phalanx.errors import JobError, PhalanxError
from phalanx.units import format_bytes

_DRAIN_S = 5


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


def sentence(settings: ServeSettings, url: str, ready: dict[str, Any]) -> str:
    """What a person reads at the start."""
    return (
        f"{settings.model_name} ({ready['dtype']}) listens at {url}: up to {ready['max_running']} "
        f"requests at once, {ready['max_tokens']} tokens each (prompt and output); KV cache of "
        f"{ready['kv_tokens']} tokens, {format_bytes(ready['kv_bytes'])}, holds "
        f"{ready['kv_tokens'] // ready['max_tokens']} requests of full length"
    )


async def serve(
    settings: ServeSettings,
    announce: Callable[[str, str], None],
    *,
    until_end_of_input: bool = False,
) -> None:
    """Listen until a signal ends it.

    Args:
        announce: gets the address and the sentence for people, once requests are answered.
        until_end_of_input: end with standard input too.

    Raises:
        JobError: as `require_servable` and `listen`, before any process starts; then as
            `EngineClient.start`.
    """
    require_servable(settings)
    tokeniser = Tokeniser(settings.folder)
    sock = listen(settings)
    try:
        client = await EngineClient.start(settings)
    except BaseException:
        sock.close()
        raise
    host, port = sock.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    config = uvicorn.Config(
        create_app(client, tokeniser),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_DRAIN_S,
        lifespan="off",
    )
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        while not server.started and not running.done():
            await asyncio.sleep(0.01)
        announce(url, sentence(settings, url, client.ready))
        if until_end_of_input:
            await asyncio.wait(
                (running, asyncio.create_task(_end_of_input())),
                return_when=asyncio.FIRST_COMPLETED,
            )
            server.should_exit = True
        await running
    finally:
        await client.close()


async def _end_of_input() -> None:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    await reader.read()


def main() -> int:
    """What `start_server` runs."""
    settings = ServeSettings(**json.loads(sys.stdin.readline()))

    def announce(url: str, text: str) -> None:
        _tell({"kind": "ready", "url": url, "sentence": text})

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
