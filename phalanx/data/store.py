"""Prepared samples on disk: flat arrays that processes map into memory and share.

A folder holds, for each part ("train", "held_out"), the arrays of `Samples` as raw little-endian
numbers, and where each sample came from; `prepared.json` with the account; `dropped.jsonl` with
every row that was dropped or cut. Writing and reading need memory for one row at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from phalanx.data.samples import Audit, Sample, Samples

PARTS = ("train", "held_out")
_ARRAYS = {"tokens": "<i4", "counted": "?", "bounds": "<i8", "keys": "<u8"}
_ORIGINS = {"where": "u1", "where_bounds": "<i8"}


@dataclass(frozen=True)
class Prepared:
    """Training and held-out samples with their account.

    Attributes:
        path: the folder they were read from.
    """

    train: Samples
    held_out: Samples
    audit: Audit
    path: Path

    @property
    def longest(self) -> int:
        """Tokens of the longest sample of both parts: no row may be shorter."""
        lengths = (part.lengths for part in (self.train, self.held_out) if len(part))
        return max(int(each.max()) for each in lengths)

    def where(self, part: str, index: int) -> str:
        """File and line that a sample of "train" or "held_out" came from."""
        bounds = _mapped(self.path, part, "where_bounds")
        text = _mapped(self.path, part, "where")[bounds[index] : bounds[index + 1]]
        return text.tobytes().decode()

    def dropped(self) -> Iterator[dict[str, Any]]:
        """The lines of `dropped.jsonl`: where, part, tokens, dropped_tokens, reason."""
        with (self.path / "dropped.jsonl").open(encoding="utf-8") as file:
            yield from map(json.loads, file)


class PartWriter:
    """Appends samples to the arrays of one part."""

    def __init__(self, folder: Path, part: str, stack: ExitStack) -> None:
        self._files: dict[str, IO[bytes]] = {
            name: stack.enter_context((folder / f"{part}.{name}").open("wb"))
            for name in (*_ARRAYS, *_ORIGINS)
        }
        self.num_samples = self.num_tokens = self.num_counted = self.longest = 0
        self._where_bytes = 0
        for name in ("bounds", "where_bounds"):
            self._put(name, [0])

    def add(self, sample: Sample, where: str) -> None:
        """One more sample and where it came from."""
        origin, length = where.encode(), len(sample.tokens)
        self.num_samples, self.num_tokens = self.num_samples + 1, self.num_tokens + length
        self.num_counted += int(sample.counted.sum())
        self.longest = max(self.longest, length)
        self._where_bytes += len(origin)
        self._put("tokens", sample.tokens)
        self._put("counted", sample.counted)
        self._put("bounds", [self.num_tokens])
        self._put("keys", [sample.key])
        self._files["where"].write(origin)
        self._put("where_bounds", [self._where_bytes])

    def _put(self, name: str, values: Any) -> None:
        dtype = (_ARRAYS | _ORIGINS)[name]
        self._files[name].write(np.asarray(values, dtype=dtype).tobytes())


@contextmanager
def part_writers(folder: Path) -> Iterator[dict[str, PartWriter]]:
    """A writer for each part; the files are closed at the end."""
    with ExitStack() as stack:
        yield {part: PartWriter(folder, part, stack) for part in PARTS}


def write_account(folder: Path, format_version: int, audit: Audit) -> None:
    """The last file of a folder."""
    document = {"format_version": format_version, "audit": asdict(audit)}
    (folder / "prepared.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def read_prepared(path: str | Path) -> Prepared:
    """What `prepare` wrote, mapped into memory."""
    path = Path(path)
    document = json.loads((path / "prepared.json").read_text(encoding="utf-8"))
    train, held_out = (
        Samples(*(_mapped(path, part, name) for name in ("tokens", "counted", "bounds", "keys")))
        for part in PARTS
    )
    return Prepared(train, held_out, Audit(**document["audit"]), path)


def _mapped(folder: Path, part: str, name: str) -> np.ndarray:
    path, dtype = folder / f"{part}.{name}", np.dtype((_ARRAYS | _ORIGINS)[name])
    if path.stat().st_size == 0:  # nothing can be mapped
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))
