"""Messages between front end and engine core: one JSON object per line over a local socket.

Front end to core: settings (once), then "add", "cancel", "update", "ping". End of file closes.
Core to front end: "ready" or "failed" (once), then "step", "updated", "refused", "pong".
"""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Mapping
from typing import Any

from phalanx.errors import JobError, PhalanxError, PlanError, WorldError

_CHUNK = 1 << 20
_CLASSES = {cls.__name__: cls for cls in (JobError, PlanError, WorldError)}


def encode(message: Mapping[str, Any]) -> bytes:
    """One line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def error_to_json(error: PhalanxError) -> dict[str, Any]:
    """An error that another process shall raise."""
    return {
        "class": type(error).__name__,
        "code": error.code,
        "where": error.where,
        "value": None if error.value is None else str(error.value),
        "rule": error.rule,
        "legal": [str(each) for each in error.legal],
    }


def error_from_json(table: Mapping[str, Any]) -> PhalanxError:
    """The error again."""
    cls = _CLASSES.get(table["class"], WorldError)
    return cls(table["code"], table["where"], table["value"], table["rule"], legal=table["legal"])


class LineSocket:
    """The core's blocking end.

    Args:
        connection: a connected stream socket, owned from now on.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message; a front end that is gone is noticed when reading."""
        try:
            self._connection.sendall(encode(message))
        except (BrokenPipeError, ConnectionResetError):
            return

    def receive(self, wait: bool) -> list[dict[str, Any]] | None:
        """Messages that have come, at least one if `wait`; None when the other end is closed."""
        while True:
            while wait or select.select([self._connection], [], [], 0)[0]:
                try:
                    data = self._connection.recv(_CHUNK)
                except ConnectionResetError:
                    return None
                if not data:
                    return None
                self._buffer += data
                if data.endswith(b"\n"):
                    break
            end = self._buffer.rfind(b"\n") + 1
            lines, self._buffer = bytes(self._buffer[:end]).splitlines(), self._buffer[end:]
            if lines or not wait:
                return [json.loads(line) for line in lines]
