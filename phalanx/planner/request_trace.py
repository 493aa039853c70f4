"""Requests with their times and lengths: from a file, or at a rate. No torch.

A file is JSON lines or CSV (by its ending) with the fields arrival_s, prompt_tokens and
output_tokens; arrivals rise from line to line.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.errors import JobError, shown
from phalanx.planner.serving import arrivals

FIELDS = ("arrival_s", "prompt_tokens", "output_tokens")
_MOST_TOKENS = 2**31


@dataclass(frozen=True)
class RequestTrace:
    """Requests in the order in which they arrive; arrays of one length.

    Attributes:
        arrival_s: from the first request on.
        prompt_tokens, output_tokens: of each.
        source: in words.
    """

    arrival_s: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    source: str

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def rate_per_s(self) -> float:
        """Mean arrivals; infinite when all come at once."""
        last_s = float(self.arrival_s[-1])
        return (len(self) - 1) / last_s if last_s > 0 else float("inf")

    def every(self, step: int, first: int = 0) -> RequestTrace:
        """What one of `step` engines gets that take turns."""
        chosen = slice(first, None, step)
        return RequestTrace(
            self.arrival_s[chosen],
            self.prompt_tokens[chosen],
            self.output_tokens[chosen],
            self.source,
        )


def poisson(
    rate_per_s: float, count: int, prompt_tokens: int, output_tokens: int, seed: int = 0
) -> RequestTrace:
    """`count` requests of equal lengths at random moments."""
    return RequestTrace(
        np.asarray(arrivals(count, rate_per_s, seed)),
        np.full(count, prompt_tokens),
        np.full(count, output_tokens),
        f"{count} Poisson arrivals",
    )


def read_requests(path: str) -> RequestTrace:
    """A file of requests.

    Raises:
        JobError: `job/not-found` for a file that cannot be read; `data/empty` for one without
            requests; `job/syntax`, `job/missing` and `job/bad-value` with the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is not text"
        raise JobError("job/not-found", "--trace", path, f"cannot be read: {reason}") from error
    rows = _csv_rows(path, lines) if path.endswith(".csv") else _json_rows(path, lines)
    values = [_checked(where, row) for where, row in rows]
    if not values:
        raise JobError("data/empty", path, 0, "holds no request")
    arrival_s = np.asarray([value[0] for value in values])
    falls = np.flatnonzero(np.diff(arrival_s) < 0)
    if falls.size:
        where = f"{path}, request {falls[0] + 2}: arrival_s"
        rule = "arrives before the request above it; sort the trace"
        raise JobError("job/bad-value", where, float(arrival_s[falls[0] + 1]), rule)
    return RequestTrace(
        arrival_s - arrival_s[0],
        np.asarray([value[1] for value in values]),
        np.asarray([value[2] for value in values]),
        f"{len(values)} requests of {Path(path).name}",
    )


def _json_rows(path: str, lines: Iterable[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise JobError("job/syntax", where, shown(line), "is not valid JSON") from error
        if not isinstance(row, Mapping):
            raise JobError("job/syntax", where, shown(line), "must be a JSON object")
        yield where, row


def _csv_rows(path: str, lines: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, row in enumerate(csv.DictReader(lines), 2):
        yield f"{path}, line {number}", row


def _checked(where: str, row: Mapping[str, Any]) -> tuple[float, int, int]:
    absent = [name for name in FIELDS if row.get(name) in (None, "")]
    if absent:
        rule = f"every request needs {', '.join(FIELDS)}"
        raise JobError("job/missing", f"{where}: {', '.join(absent)}", None, rule)
    arrival_s = _number(f"{where}: arrival_s", row["arrival_s"], 0.0)
    prompt, output = (_number(f"{where}: {name}", row[name], 1.0) for name in FIELDS[1:])
    for name, value in zip(FIELDS[1:], (prompt, output)):
        if value != int(value) or value > _MOST_TOKENS:
            rule = "must be a whole number of tokens"
            raise JobError("job/bad-value", f"{where}: {name}", value, rule)
    return arrival_s, int(prompt), int(output)


def _number(where: str, value: Any, least: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if isinstance(value, bool) or not isfinite(number) or number < least:
        raise JobError("job/bad-value", where, shown(value), f"must be a number >= {least:g}")
    return number
