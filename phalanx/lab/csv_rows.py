"""Reading a table of measurements: every cell that should be a number is one, or empty.

A cell that is none costs its own row, which says so, not the table: strangers' tables have a "4-8"
somewhere. A table without one whole row is refused, with its first mistakes.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from phalanx.errors import JobError, nearest_names, shown

_LARGEST_COUNT = 1e12
# how tables write that they do not say; in columns of numbers "none" too
_UNSAID = frozenset(("-", "--", "n/a", "na", "nan", "null", "unknown", "not stated", "?"))
_MOST_SHOWN = 4  # mistakes that the message names; the rest is counted


@dataclass(frozen=True, slots=True)
class CsvRow:
    """One line of a table.

    Attributes:
        line: in the file, counted from 1.
        text: column (in lower case) -> cell, without blanks around it.
        numbers: column -> number, for the cells of number columns that are not empty.
        broken: columns of numbers that hold something else, with what they hold.
    """

    line: int
    text: Mapping[str, str]
    numbers: Mapping[str, float]
    broken: tuple[str, ...] = ()

    def get(self, column: str) -> str:
        """A cell; empty where the table lacks the column."""
        return self.text.get(column, "")

    def words(self, column: str) -> str:
        """A cell in lower case, for texts whose capitals mean nothing."""
        return self.get(column).lower()

    @property
    def unread(self) -> list[str]:
        """The columns of `broken`, as names of missing inputs."""
        return [f"a number in {each.partition(' = ')[0]}" for each in self.broken]

    @property
    def is_from_memory(self) -> bool:
        """Whether its values were recalled, not read from their source."""
        return "from memory" in self.words("source_check")

    def number(self, column: str) -> float | None:
        """A number; None where the cell is empty."""
        return self.numbers.get(column)

    def count(self, column: str) -> int | None:
        """A whole number from 1 on; None where the cell is empty, 0, broken or absurdly large."""
        value = self.numbers.get(column)
        is_count = value is not None and 1 <= value <= _LARGEST_COUNT and value == int(value)
        return int(value) if is_count and value is not None else None


def seen_table(name: str) -> Path:
    """The path of a table that Phalanx ships: "training" or "serving"."""
    return Path(str(files("phalanx.lab"))) / "tables" / f"{name}_throughput.csv.gz"


def read_rows(path: str | Path, *, required: Sequence[str], numbers: Sequence[str]) -> list[CsvRow]:
    """All lines of a table (CSV, also gzipped); capitals of its header mean nothing.

    Args:
        path: of the file.
        required: columns that must exist.
        numbers: columns of finite numbers of at least 0; cells may be empty.

    Raises:
        JobError: `job/not-found`; `system/published` for a table that is empty, lacks columns or
            has in every row something else than numbers where numbers belong, with the lines.
    """
    where = str(path)
    reader = csv.DictReader(io.StringIO(_content(Path(path)), newline=""), restkey="")
    try:
        header = [name.strip().lower() for name in reader.fieldnames or []]
        lines = [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        rule = f"is no CSV: {error}"
        raise JobError("system/published", where, f"line {reader.line_num}", rule) from None
    _require_columns(header, required, where)
    if not lines:
        raise JobError("system/published", where, None, "has no rows under its header")
    rows = [_row(line, cells, numbers) for line, cells in lines]
    if all(row.broken for row in rows):
        wrong = [f"line {row.line}, {each}" for row in rows for each in row.broken]
        more = f" and {len(wrong) - _MOST_SHOWN} more" if len(wrong) > _MOST_SHOWN else ""
        told = "; ".join(wrong[:_MOST_SHOWN]) + more
        raise JobError("system/published", where, None, f"has cells that are no numbers: {told}")
    return rows


def _content(path: Path) -> str:
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        return raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise JobError("job/not-found", "table", str(path), "no such file") from None
    except (OSError, EOFError, ValueError) as error:
        rule = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise JobError("system/published", str(path), None, rule) from None


def _require_columns(header: Sequence[str], required: Sequence[str], where: str) -> None:
    if not header:
        raise JobError("system/published", where, None, "is empty")
    absent = [name for name in required if name not in header]
    if absent:
        near = sorted({each for name in absent for each in nearest_names(name, header, count=1)})
        rule = f"lacks the columns {', '.join(absent)}"
        raise JobError("system/published", where, None, rule, legal=near)


def _row(line: int, cells: Mapping, names: Sequence[str]) -> CsvRow:
    text = {
        (key or "").strip().lower(): _said(cell)
        for key, cell in cells.items()
        if isinstance(cell, str)
    }
    numbers, broken = {}, []
    for name in names:
        cell = text.get(name, "")
        if cell.lower() == "none":
            cell = text[name] = ""
        if not cell:
            continue
        value = _number(cell)
        if value is None:
            broken.append(f"{name} = {shown(cell)}")
        else:
            numbers[name] = value
    return CsvRow(line, text, numbers, tuple(broken))


def _said(cell: str) -> str:
    plain = cell.strip()
    return "" if plain.lower() in _UNSAID else plain


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
