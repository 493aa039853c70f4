"""Requests with their times and lengths: from a file, or at a rate. No torch.

A file is JSON lines or CSV (by its ending) with the fields arrival_s, prompt_tokens and
output_tokens; arrivals rise from line to line. Prompts that begin alike say so by prefix_ids, an id
for each block of prefix_block_tokens tokens from their beginning on (in CSV with spaces between).

The open traces of Mooncake are read as they are (github.com/kvcache-ai/Mooncake, FAST25-release):
timestamp in milliseconds, input_length, output_length, hash_ids of 512 tokens each.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.errors import JobError, shown
from phalanx.planner.request_prefixes import Prefixes, prefixes_of
from phalanx.planner.serving import arrivals

FIELDS = ("arrival_s", "prompt_tokens", "output_tokens")
_PREFIX, _PREFIX_TOKENS = "prefix_ids", "prefix_block_tokens"
_MOONCAKE = ("timestamp", "input_length", "output_length")
_MOONCAKE_IDS, _MOONCAKE_TOKENS, _MOONCAKE_PER_S = "hash_ids", 512, 1000.0
_MOST_TOKENS = 2**31


@dataclass(frozen=True)
class RequestTrace:
    """Requests in the order in which they arrive; arrays of one length.

    Attributes:
        arrival_s: from the first request on.
        prompt_tokens, output_tokens: of each.
        source: in words.
        prefixes: which prompts begin alike; None: none that is known.
    """

    arrival_s: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    source: str
    prefixes: Prefixes | None = None

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
            self.prefixes.every(step, first) if self.prefixes is not None else None,
        )


def poisson(
    rate_per_s: float,
    count: int,
    prompt_tokens: int,
    output_tokens: int,
    seed: int = 0,
    shared_tokens: int = 0,
) -> RequestTrace:
    """`count` requests of equal lengths at random moments, whose first tokens may be the same."""
    return RequestTrace(
        np.asarray(arrivals(count, rate_per_s, seed)),
        np.full(count, prompt_tokens),
        np.full(count, output_tokens),
        f"{count} Poisson arrivals",
        prefixes_of([(0,)] * count, shared_tokens) if shared_tokens else None,
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
    asked = [_asked(where, row) for where, row in rows]
    if not asked:
        raise JobError("data/empty", path, 0, "holds no request")
    arrival_s = np.asarray([each.arrival_s for each in asked])
    falls = np.flatnonzero(np.diff(arrival_s) < 0)
    if falls.size:
        where = f"{path}, request {falls[0] + 2}: arrival_s"
        rule = "arrives before the request above it; sort the trace"
        raise JobError("job/bad-value", where, float(arrival_s[falls[0] + 1]), rule)
    return RequestTrace(
        arrival_s - arrival_s[0],
        np.asarray([each.prompt_tokens for each in asked]),
        np.asarray([each.output_tokens for each in asked]),
        f"{len(asked)} requests of {Path(path).name}",
        _prefixes(path, asked),
    )


@dataclass(frozen=True)
class _Asked:
    """A request as a line has it; `id_tokens` is 0 without ids."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    ids: Sequence[int]
    id_tokens: int


def _prefixes(path: str, asked: Sequence[_Asked]) -> Prefixes | None:
    sizes = sorted({each.id_tokens for each in asked if each.ids})
    if not sizes:
        return None
    if len(sizes) > 1:
        rule = "must be the same in all lines of a trace"
        raise JobError("job/bad-value", f"{path}: {_PREFIX_TOKENS}", sizes[:3], rule)
    return prefixes_of([each.ids for each in asked], sizes[0])


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


def _asked(where: str, row: Mapping[str, Any]) -> _Asked:
    is_mooncake = FIELDS[0] not in row and any(name in row for name in _MOONCAKE[:2])
    fields, ids_field = (_MOONCAKE, _MOONCAKE_IDS) if is_mooncake else (FIELDS, _PREFIX)
    absent = [name for name in fields if row.get(name) in (None, "")]
    if absent:
        rule = f"every request needs {', '.join(fields)}"
        raise JobError("job/missing", f"{where}: {', '.join(absent)}", None, rule)
    arrival = _number(f"{where}: {fields[0]}", row[fields[0]], 0.0)
    prompt, output = (_tokens(f"{where}: {name}", row[name]) for name in fields[1:])
    ids, size = _ids(f"{where}: {ids_field}", row.get(ids_field)), 0
    if ids:
        size = _MOONCAKE_TOKENS if is_mooncake else _id_tokens(where, row)
        begun = ceil(prompt / size)
        if len(ids) > begun or (is_mooncake and len(ids) < begun):
            rule = f"{prompt} tokens begin {begun} blocks of {size}, each with an id"
            raise JobError("job/bad-value", f"{where}: {ids_field}", f"{len(ids)} ids", rule)
    return _Asked(arrival / (_MOONCAKE_PER_S if is_mooncake else 1.0), prompt, output, ids, size)


def _ids(where: str, value: Any) -> Sequence[int]:
    """Of a JSON list, or of a cell of a table."""
    if value in (None, ""):
        return ()
    found = value
    if isinstance(value, str):
        words = value.strip("[] ").replace(",", " ").split()
        found = [int(word) if word.isdecimal() else word for word in words]
    rule = "must be a list of whole numbers from 0 on"
    if not isinstance(found, list):
        raise JobError("job/bad-value", where, shown(value), rule)
    for each in found:
        if type(each) is not int or each < 0:
            raise JobError("job/bad-value", where, shown(each), rule)
    return found


def _id_tokens(where: str, row: Mapping[str, Any]) -> int:
    if row.get(_PREFIX_TOKENS) in (None, ""):
        rule = f"says how many tokens each of {_PREFIX} stands for"
        raise JobError("job/missing", f"{where}: {_PREFIX_TOKENS}", None, rule)
    return _tokens(f"{where}: {_PREFIX_TOKENS}", row[_PREFIX_TOKENS])


def _tokens(where: str, value: Any) -> int:
    number = _number(where, value, 1.0)
    if number != int(number) or number > _MOST_TOKENS:
        raise JobError("job/bad-value", where, number, "must be a whole number of tokens")
    return int(number)


def _number(where: str, value: Any, least: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if isinstance(value, bool) or not isfinite(number) or number < least:
        raise JobError("job/bad-value", where, shown(value), f"must be a number >= {least:g}")
    return number
