"""Messages between front end and engine core: one JSON object per line over a local socket.

The first line of the front end holds the settings. After it every message has a "kind" and the
fields that `MESSAGES` names. End of file closes, on both sides.

    front end to core                                     core to front end
    add, cancel                                           ready or failed (once), step, rejected
    update, load_adapter, unload_adapter, sleep, wake     done or refused, with their number
                                                          beat (every half second)

"failed" after "ready" is a core's last word: what was wrong with a step.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from asyncio import StreamReader
from collections.abc import Iterator, Mapping
from typing import Any

from phalanx.errors import JobError, PhalanxError, PlanError, WorldError, shown

MAX_LINE_BYTES = 1 << 28
_CHUNK = 1 << 20
_CLASSES = {cls.__name__: cls for cls in (JobError, PlanError, WorldError)}
MESSAGES: dict[str, dict[str, type]] = {
    "add": {"request": int, "tokens": list, "sampling": dict},
    "cancel": {"request": int},
    "update": {"number": int, "folder": str, "version": str},
    "load_adapter": {"number": int, "name": str, "folder": str, "version": int},
    "unload_adapter": {"number": int, "name": str},
    "sleep": {"number": int, "level": int},
    "wake": {"number": int},
    "ready": {"weight_version": str},
    "failed": {"error": dict},
    "step": {"outputs": list, "requests": list, "step_s": float, "counters": dict},
    "rejected": {"request": int, "error": dict},
    "done": {"number": int, "weight_version": str, "adapters": dict},
    "refused": {"number": int, "error": dict},
    "beat": {"counters": dict},
}


def encode(message: Mapping[str, Any]) -> bytes:
    """One line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """The object of one line.

    Raises:
        WorldError: `serve/engine` for a line that is cut off or no JSON object.
    """
    if not line.endswith(b"\n"):
        raise _garbage(line, "ends before its line does")
    try:
        table = json.loads(line.decode())
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise _garbage(line, f"is not valid JSON: {error}") from None
    if not isinstance(table, dict):
        raise _garbage(line, "must be a JSON object")
    return table


def read_message(line: bytes) -> dict[str, Any]:
    """The message of one line.

    Raises:
        WorldError: `serve/engine` for what `decode` refuses, a kind that does not exist, or a field
            that is missing or of another type.
    """
    message = decode(line)
    kind = message.get("kind")
    if not isinstance(kind, str) or kind not in MESSAGES:
        raise _garbage(line, f"has no kind that is known: {shown(kind)}")
    for name, wanted in MESSAGES[kind].items():
        value = message.get(name)
        if not isinstance(value, wanted) or isinstance(value, bool):
            rule = f"of kind {kind!r} needs {name}, of type {wanted.__name__}"
            raise _garbage(line, rule)
    return message


def _garbage(line: bytes, rule: str) -> WorldError:
    where = "message between front end and engine"
    return WorldError("serve/engine", where, shown(line[:80]), rule)


async def next_message(reader: StreamReader) -> dict[str, Any] | None:
    """The next message for an event loop; None when the other end closed, even within a line.

    Raises:
        WorldError: as `read_message`, and for a line longer than the reader's limit.
    """
    try:
        line = await reader.readline()
    except ValueError:
        raise _garbage(b"", f"is longer than {MAX_LINE_BYTES} bytes") from None
    except OSError:
        return None
    return read_message(line) if line.endswith(b"\n") else None


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
    """The core's blocking end. One thread receives; any thread may send.

    It also knows whether the receiving thread works: from the moment a message is there until it
    waits for the next one.

    Args:
        connection: a connected stream socket, owned from now on.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()
        self._has_settings = False
        self._sending = threading.Lock()
        self._receiver = threading.get_ident()
        self._since_s: float | None = time.monotonic()  # None: it waits, or takes its time

    @property
    def busy_s(self) -> float | None:
        """Seconds since the receiving thread last showed progress; None when it waits."""
        since_s = self._since_s
        return None if since_s is None else time.monotonic() - since_s

    @contextlib.contextmanager
    def long_work(self) -> Iterator[None]:
        """What happens inside may take as long as it takes (a slow disk) and is no stall."""
        self._since_s = None
        try:
            yield
        finally:
            self._since_s = time.monotonic()

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send one message whole; False when the front end is gone, which reading shows too."""
        line = encode(message)
        try:
            with self._sending:
                self._connection.sendall(line)
        except OSError:
            return False
        if self._since_s is not None and threading.get_ident() == self._receiver:
            self._since_s = time.monotonic()
        return True

    def receive(self, wait: bool) -> list[dict[str, Any]] | None:
        """Messages that have come, at least one if `wait`; None when the other end is closed.

        Raises:
            WorldError: `serve/engine` for a line that is no message or is too long.
        """
        try:
            while self._fill(wait):
                lines = self._whole_lines()
                if lines or not wait:
                    return [self._read(line) for line in lines]
            return None
        finally:
            self._since_s = time.monotonic()

    def _fill(self, wait: bool) -> bool:
        """Take what is there, with `wait` something at least; False at the end of file."""
        if wait:
            self._since_s = None
        while wait or select.select([self._connection], [], [], 0)[0]:
            wait = False
            try:
                data = self._connection.recv(_CHUNK)
            except OSError:
                return False
            if not data:
                return False
            self._buffer += data
            if len(self._buffer) - self._buffer.rfind(b"\n") > MAX_LINE_BYTES:
                raise _garbage(b"", f"is longer than {MAX_LINE_BYTES} bytes")
        return True

    def _whole_lines(self) -> list[bytes]:
        end = self._buffer.rfind(b"\n") + 1
        lines = bytes(self._buffer[:end]).splitlines(keepends=True)
        del self._buffer[:end]
        return lines

    def _read(self, line: bytes) -> dict[str, Any]:
        if self._has_settings:
            return read_message(line)
        self._has_settings = True
        return decode(line)
