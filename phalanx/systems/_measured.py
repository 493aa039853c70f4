"""Numbers of real runs that a reproduction is too quick to repeat, with machine and date.

`measured/<slug>.csv` is written by the benchmark that its notes name; a row joins the formula,
simulated and published rows of the same quantity.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

from phalanx.errors import PlanError
from phalanx.report import Row

FOLDER = Path(__file__).parent / "measured"
COLUMNS = ("quantity", "value", "unit", "target", "tolerance", "bound", "note")


def measured(slug: str) -> list[Row]:
    """The recorded rows of a system; none where nothing was recorded.

    Raises:
        PlanError: `system/published` for a file that is no table of these columns and numbers.
    """
    path = FOLDER / f"{slug}.csv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        header, *lines = csv.reader(file)
    if tuple(header) != COLUMNS:
        rule, legal = "must have these columns", [",".join(COLUMNS)]
        raise PlanError("system/published", f"measured/{slug}.csv", header, rule, legal=legal)
    return [_row(dict(zip(COLUMNS, line))) for line in lines if line]


def record(slug: str, rows: Iterable[Row], note: str) -> None:
    """Keep the measured ones of these rows, in place of those of the same quantity.

    Args:
        note: machine, date and benchmark.
    """
    new = {row.quantity: row for row in rows if row.source == "measured"}
    kept = [row for row in measured(slug) if row.quantity not in new]
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / f"{slug}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in kept:
            writer.writerow(_cells(row, row.note))
        for row in new.values():
            writer.writerow(_cells(row, f"{row.note}; {note}" if row.note else note))


def _cells(row: Row, note: str) -> list[object]:
    target = "" if row.target is None else row.target
    slack = row.tolerance
    if row.target is not None:
        slack = max(slack, row.tolerance_frac * abs(row.target))
    return [row.quantity, row.value, row.unit, target, slack, row.bound, note]


def _row(cells: dict[str, str]) -> Row:
    return Row(
        quantity=cells["quantity"],
        value=float(cells["value"]),
        unit=cells["unit"],
        source="measured",
        note=cells["note"],
        target=float(cells["target"]) if cells["target"] else None,
        tolerance=float(cells["tolerance"] or 0.0),
        bound=cells["bound"] or "both",
    )
