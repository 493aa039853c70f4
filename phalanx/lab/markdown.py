"""Words, numbers and tables of the page."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

QUANTITY_NAMES = {
    "step_s": "step time",
    "memory_bytes": "peak memory",
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "latency_s": "request latency",
    "output_tokens_per_s_per_device": "tokens/s/device",
}


def percent(value: float | None, *, sign: bool = False) -> str:
    """With one digit below 10 %; empty for what is unknown."""
    if value is None or value != value:
        return ""
    digits = 1 if abs(value) < 0.0995 else 0
    return f"{100 * value:{'+' if sign else ''}.{digits}f}%"


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table, an empty one before and after."""
    yield ""
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for line in lines:
        yield f"| {' | '.join(line)} |"
    yield ""


def wrapped(text: str, bullet: str = "") -> str:
    """Lines of at most 100 characters."""
    hang = " " * len(bullet)
    return textwrap.fill(text, 100, initial_indent=bullet, subsequent_indent=hang)
