"""What rank 0 tells its launcher: JSON text sequences (RFC 7464) on its standard output, on which
code of the user's may print whatever it likes. No torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

_MARK = "\x1e"  # ASCII's record separator, which stands before each event


def tell(event: Mapping[str, Any]) -> None:
    """Print an event, whole."""
    sys.stdout.write(f"{_MARK}{json.dumps(event, ensure_ascii=False)}\n")
    sys.stdout.flush()


def hear(line: str, on_event: Callable[[Mapping[str, Any]], None]) -> None:
    """Pass on what a line holds: an event, and other text as one of kind "log"."""
    text, _, told = line.partition(_MARK)
    try:
        event = json.loads(told) if told else None
    except ValueError:  # a mark that somebody else wrote
        text, event = line, None
    if text.strip():
        on_event({"kind": "log", "text": text})
    if event is not None:
        on_event(event)
