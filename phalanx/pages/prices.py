"""What a job costs elsewhere, as tables: machines beside each other, formula beside published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.pages.content import short
from phalanx.pages.shown import Shown, percent, shown_row
from phalanx.report import Joined, Report, Row, compare

_ELSEWHERE = "elsewhere"
_WORD = 50  # longer notes stand below the table
_NAMES = {"hours": "time"}  # which is shown in hours, minutes or seconds


@dataclass(frozen=True)
class Cell:
    """A value with the word that goes with it ("fits")."""

    value: Shown
    word: str


@dataclass(frozen=True)
class Machines:
    """This job on several machines: a column each.

    Attributes:
        lines: (quantity, a value per machine).
        notes: (machine and quantity, note), where it is more than a word.
    """

    names: Sequence[str]
    lines: Sequence[tuple[str, Sequence[Cell]]]
    notes: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Beside:
    """One quantity of the formula beside what was published."""

    name: str
    formula: Shown
    published: Shown
    error: str
    note: str


def machines(report: Report) -> Machines:
    """Rows "elsewhere/MACHINE/QUANTITY"."""
    found = [(row.quantity.split("/"), row) for row in report.rows]
    chosen = {
        (parts[1], parts[2]): row
        for parts, row in found
        if len(parts) == 3 and parts[0] == _ELSEWHERE
    }
    names = list(dict.fromkeys(name for name, _ in chosen))
    quantities = list(dict.fromkeys(quantity for _, quantity in chosen))
    lines = [
        (_NAMES.get(quantity, quantity), [_cell(chosen.get((name, quantity))) for name in names])
        for quantity in quantities
    ]
    notes = [
        (f"{name}, {_NAMES.get(quantity, quantity)}", row.note)
        for (name, quantity), row in chosen.items()
        if len(row.note) > _WORD
    ]
    return Machines(names, lines, notes)


def _cell(row: Row | None) -> Cell:
    return Cell(shown_row(row), row.note if row is not None and len(row.note) <= _WORD else "")


def price_lines(report: Report) -> list[str]:
    """Time, price and memory, a line per machine, for the terminal."""
    there = machines(report)
    lines = []
    for at, name in enumerate(there.names):
        told = [
            f"{quantity} {cells[at].value}" + (f" ({cells[at].word})" if cells[at].word else "")
            for quantity, cells in there.lines
            if cells[at].value.text
        ]
        lines.append(f"{name}: {', '.join(told)}")
    return lines


def beside_published(report: Report) -> list[tuple[str, list[Beside]]]:
    """Every other row by its group, formula beside published."""
    rest = [row for row in report.rows if row.quantity.split("/")[0] != _ELSEWHERE]
    found: dict[str, list[Beside]] = {}
    for joined in compare([Report("", rest)]):
        group, _, name = short(joined.quantity).rpartition("/")
        found.setdefault(group, []).append(_beside(name, joined))
    return list(found.items())


def _beside(name: str, joined: Joined) -> Beside:
    rows = list(joined.by_source.values())
    said, told = joined.by_source.get("formula"), joined.by_source.get("published")
    error = joined.error_frac
    return Beside(
        name=_NAMES.get(name, name),
        formula=shown_row(said, rows),
        published=shown_row(told, rows),
        error="" if error is None else percent(error),
        note="; ".join(dict.fromkeys(row.note for row in rows if row.note)),
    )


def remarks(report: Report) -> list[tuple[str, Any]]:
    """What has to be known with the numbers: the report's notes."""
    return [(name, text) for name, text in report.notes.items() if text]
