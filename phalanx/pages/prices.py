"""What a job costs elsewhere, as tables: machines beside each other, formula beside published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.pages.content import short
from phalanx.pages.shown import Shown, percent, shown_row
from phalanx.report import Joined, Report, Row, compare

_ELSEWHERE = "elsewhere"
_NAMES = {"hours": "time"}  # which is shown in hours, minutes or seconds


@dataclass(frozen=True)
class Machines:
    """This job on several machines: a column each.

    Attributes:
        lines: (quantity, a value per machine).
        notes: (machine and quantity, note).
    """

    names: Sequence[str]
    lines: Sequence[tuple[str, Sequence[Shown]]]
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
    lines = []
    for quantity in quantities:
        rows: list[Row | None] = [chosen.get((name, quantity)) for name in names]
        lines.append((_NAMES.get(quantity, quantity), [shown_row(row) for row in rows]))
    notes = [
        (f"{name}, {_NAMES.get(quantity, quantity)}", row.note)
        for (name, quantity), row in chosen.items()
    ]
    return Machines(names, lines, [note for note in notes if note[1]])


def price_lines(report: Report) -> list[str]:
    """Time, price and memory, a line per machine, for the terminal."""
    there = machines(report)
    lines = []
    for at, name in enumerate(there.names):
        told = [f"{quantity} {values[at]}" for quantity, values in there.lines if values[at].text]
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
