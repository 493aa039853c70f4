"""Files of rows, read row by row: memory is bounded by the longest row, not by the file.

Every reader yields (row, where) with `where` = "file:line", or "file: row 12" for parquet, and
raises `JobError` with it for whatever is not what the file's ending says.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from phalanx.data.rows import COLUMNS
from phalanx.errors import JobError, shown

Rows = Iterator[tuple[Any, str]]
_CHUNK_CHARS = 1 << 20
_TEXT_BYTES = 4 << 20  # a longer .txt file becomes several documents
_BATCH_ROWS = 256
_BOMS = {
    codecs.BOM_UTF8: "begins with a byte-order mark; save it as UTF-8 without one",
    codecs.BOM_UTF16_LE: "is UTF-16; save it as UTF-8",
    codecs.BOM_UTF16_BE: "is UTF-16; save it as UTF-8",
}


def read_rows(path: Path) -> Rows:
    """Rows of a file, by its ending (a key of `READERS`).

    Raises:
        JobError: `data/empty` for a file without rows; `data/row` with the line that is wrong;
            `job/not-found` for a file that cannot be read; `environment/missing` without pyarrow.
    """
    found = False
    try:
        _require_utf8(path)
        for row in READERS[path.suffix](path):
            found = True
            yield row
    except OSError as error:
        rule = f"cannot be read: {(error.strerror or str(error)).lower()}"
        raise JobError("job/not-found", "data.source", path, rule) from error
    if not found:
        raise JobError("data/empty", str(path), None, "is a file without a row")


def _require_utf8(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(4)
    if path.suffix == ".parquet":
        return
    for mark, rule in _BOMS.items():
        if head.startswith(mark):
            raise JobError("data/row", f"{path}:1", None, rule)


def _jsonl(path: Path) -> Rows:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = _decoded(line, path, number)
            if text.strip():
                yield _parsed(text, f"{path}:{number}"), f"{path}:{number}"


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also numbers of 5,000 digits
        rule = f"is not valid JSON: {error}"
        raise JobError("data/row", where, shown(text.strip()[:60]), rule) from None


def _decoded(data: bytes, path: Path, line: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        at = line + data[: error.start].count(b"\n")
        rule = f"is not UTF-8: byte 0x{data[error.start]:02x}, {error.reason}"
        raise JobError("data/row", f"{path}:{at}", None, rule) from None


def _text(path: Path) -> Rows:
    """The whole file as one document; more than 4 MiB in pieces that end with a line."""
    line, rest = 1, b""
    with path.open("rb") as file:
        while data := rest + file.read(_TEXT_BYTES - len(rest)):
            is_last = len(data) < _TEXT_BYTES
            end = len(data) if is_last else _piece_end(data)
            text = _decoded(data[:end], path, line)
            if text.strip():
                yield {"text": text}, f"{path}:{line}"
            line, rest = line + data[:end].count(b"\n"), data[end:]


def _piece_end(data: bytes) -> int:
    """Behind the last empty line, line or word of a piece; else before the last character."""
    for mark in (b"\n\n", b"\n", b" "):
        if (at := data.rfind(mark)) > 0:
            return at + len(mark)
    end = len(data) - 1
    while end > len(data) - 4 and data[end] & 0xC0 == 0x80:  # inside a UTF-8 character
        end -= 1
    return end


def _json(path: Path) -> Rows:
    """A list of rows; or, as often found under this ending, one row a line."""
    with path.open("rb") as file:
        rows = _JsonList(path, file)
        if rows.is_list():
            yield from rows.rows()
            return
    yield from _jsonl(path)


class _JsonList:
    """A JSON list, one element in memory at a time."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self.file = path, file
        self.text, self.at, self.line = "", 0, 1
        self.decode = codecs.getincrementaldecoder("utf-8")()
        self.ended = False
        self.parser = json.JSONDecoder()

    def is_list(self) -> bool:
        return self._next() == "["

    def rows(self) -> Rows:
        self._expect("[")
        if self._next() == "]":
            return
        while True:
            if not self._next():
                raise self._refusal("expected another row")
            where = f"{self.path}:{self.line}"
            yield self._element(where), where
            mark = self._expect(",]")
            if mark == "]":
                break
        if self._next():
            raise self._refusal("expected nothing behind the list")

    def _read(self, num_chars: int) -> None:
        """More text, the part behind dropped."""
        data = self.file.read(num_chars)
        self.ended = not data
        self._advance(0)
        try:
            self.text = self.text[self.at :] + self.decode.decode(data, final=self.ended)
        except UnicodeDecodeError as error:
            ahead = self.text.count("\n", self.at) + error.object[: error.start].count(b"\n")
            rule = f"is not UTF-8: {error.reason}"
            raise JobError("data/row", f"{self.path}:{self.line + ahead}", None, rule) from None
        self.at = 0

    def _advance(self, num_chars: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + num_chars)
        self.at += num_chars

    def _next(self) -> str:
        """The next character that is no white space, not consumed; "" at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in " \t\r\n":
                self._advance(1)
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self._read(_CHUNK_CHARS)

    def _expect(self, marks: str) -> str:
        found = self._next()
        if not found or found not in marks:
            raise self._refusal(f"expected {' or '.join(map(repr, marks))}")
        self._advance(1)
        return found

    def _element(self, where: str) -> Any:
        while True:
            try:
                value, end = self.parser.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                in_sight = len(self.text) - error.pos > 16 and "Unterminated" not in error.msg
                if self.ended or in_sight:
                    line = self.line + self.text.count("\n", self.at, error.pos)
                    rule = f"is not valid JSON: {error.msg}"
                    raise JobError("data/row", f"{self.path}:{line}", None, rule) from None
            except (ValueError, RecursionError) as error:
                raise JobError("data/row", where, None, f"is not valid JSON: {error}") from None
            else:
                if end < len(self.text) or self.ended:  # a number may go on behind the chunk
                    self._advance(end - self.at)
                    return value
            self._read(max(_CHUNK_CHARS, len(self.text) - self.at))

    def _refusal(self, rule: str) -> JobError:
        found = self.text[self.at : self.at + 20] or "the end of the file"
        where = f"{self.path}:{self.line}"
        return JobError("data/row", where, shown(found), f"is not valid JSON: {rule}")


def _parquet(path: Path) -> Rows:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        rule = "reading parquet needs pyarrow; run: pip install 'phalanx-parallel[data]'"
        raise JobError("environment/missing", "data.source", path, rule) from error
    number, where = 0, str(path)
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        columns = [name for name in names if name in COLUMNS]
        if not columns:
            rule = "has no column that rows are made of"
            raise JobError("data/row", where, shown(names), rule, legal=COLUMNS)
        for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
            for index in range(batch.num_rows):
                number, where = number + 1, f"{path}: row {number + 1}"
                yield {name: batch.column(name)[index].as_py() for name in columns}, where
    except (arrow.ArrowException, UnicodeDecodeError, ValueError, OverflowError) as error:
        rule = f"is not valid parquet: {str(error).splitlines()[0] if str(error) else error!r}"
        raise JobError("data/row", f"{path}: row {number + 1}", None, rule) from None


READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".parquet": _parquet,
    ".txt": _text,
}
