"""The numbers that a system's authors published, as they printed them."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import PlanError
from phalanx.report import Report, Row

FOLDER = Path(__file__).parent / "published"
COLUMNS = (
    *("system", "experiment", "model", "hardware", "devices", "configuration"),
    *("metric", "value", "unit", "baseline", "source"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One number of a paper; fields are the columns of `published/<slug>.csv`.

    Attributes:
        value: as printed: a number, or a word such as "OOM" where there is no number.
        unit: as printed, with the paper's own qualifiers ("TFLOPS (more than)").
        source: document with table, figure or section, and how it was read.
    """

    system: str
    experiment: str
    model: str
    hardware: str
    devices: str
    configuration: str
    metric: str
    value: str
    unit: str
    baseline: str
    source: str

    @property
    def number(self) -> float | None:
        """The value, or None where the paper has a word instead."""
        try:
            return float(self.value)
        except ValueError:
            return None

    @property
    def setting(self) -> str:
        """Model, devices, hardware, configuration and baseline, in one phrase."""
        on = " x ".join(filter(_is_said, (self.devices, self.hardware)))
        against = f"against {self.baseline}" if _is_said(self.baseline) else ""
        return "; ".join(filter(_is_said, (self.model, on, self.configuration, against)))

    def row(self, quantity: str = "", unit: str = "", scale: float = 1.0) -> Row:
        """A report row; `quantity` and `unit` rename it so that it joins with ours.

        Args:
            quantity: the name; empty: experiment, metric and setting.
            unit: the unit in which `scale` expresses the value; empty: as printed.
            scale: factor from the printed unit to `unit`.
        """
        number = self.number
        name = quantity or f"{self.experiment}: {self.metric} ({self.setting})"
        word = "" if number is not None else f"printed as {self.value!r}; "
        value = None if number is None else number * scale
        return Row(
            quantity=name,
            value=value,
            unit=unit or self.unit or "1",
            source="published",
            note=word + self.source,
        )


def _is_said(cell: str) -> bool:
    return cell not in ("", "-", "not found")


def published(slug: str) -> list[Published]:
    """All published numbers of a system, in file order.

    Raises:
        PlanError: `system/published` for a file that is not there or no table of these columns.
    """
    where = f"published/{slug}.csv"
    try:
        with open(FOLDER / f"{slug}.csv", newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
    except (OSError, ValueError, csv.Error) as error:  # ValueError: not UTF-8, or no header
        rule = "is no table of published numbers"
        raise PlanError("system/published", where, None, rule, detail=str(error)) from error
    if tuple(header) != COLUMNS:
        rule, legal = "must have these columns", [",".join(COLUMNS)]
        raise PlanError("system/published", f"{where}: header", repr(header), rule, legal=legal)
    for number, row in enumerate(rows, 1):
        if row and len(row) != len(COLUMNS):
            rule = f"must have {len(COLUMNS)} cells, one for each column"
            raise PlanError("system/published", f"{where}: row {number}", len(row), rule)
    return [Published(**dict(zip(COLUMNS, row))) for row in rows if row]


def published_report(slug: str, title: str) -> Report:
    """The published numbers as a report; rows that would share a name are counted."""
    report = Report(title)
    seen: Counter[str] = Counter()
    for each in published(slug):
        name = each.row().quantity
        seen[name] += 1
        count = f" #{seen[name]}" if seen[name] > 1 else ""
        report.rows.append(each.row(quantity=name + count))
    return report
