"""What it means: rows of (quantity, value, unit, source), and the table that joins their sources.

A number is formula, simulated, measured or published, and says which. A gate is a row with a target
and a tolerance; a report with a missed gate makes commands exit 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from phalanx.errors import GateError

FORMAT_VERSION = 1
SOURCES = ("formula", "simulated", "measured", "published")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number.

    Attributes:
        quantity: what is counted, by a name that other sources can share.
        value: the number; None where it is not known (the note says why).
        unit: SI unit or "1" for a ratio.
        source: one of `SOURCES`.
        note: citation, machine and date, or reason.
        target: what a gate demands (None: no gate).
        tolerance_frac: allowed relative distance from the target.
        tolerance: allowed absolute distance; the looser of the two counts.
        bound: "both", "above" (value >= target - tolerance) or "below".
    """

    quantity: str
    value: float | None
    unit: str
    source: str
    note: str = ""
    target: float | None = None
    tolerance_frac: float = 0.0
    tolerance: float = 0.0
    bound: str = "both"

    def __post_init__(self) -> None:
        assert self.source in SOURCES, self.source

    @property
    def passed(self) -> bool | None:
        """Whether the gate holds; None without a gate."""
        if self.target is None:
            return None
        if self.value is None:
            return False
        slack = max(self.tolerance, self.tolerance_frac * abs(self.target))
        slack += 1e-12 * max(1.0, abs(self.target))  # rounding of exact gates
        low, high = self.target - slack, self.target + slack
        return (self.bound == "below" or self.value >= low) and (
            self.bound == "above" or self.value <= high
        )


@dataclass
class Report:
    """Rows under a title; more rows may be added."""

    title: str
    rows: list[Row] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    def add(self, quantity: str, value: float | None, unit: str, source: str, **rest: Any) -> Row:
        """Append a row and return it."""
        row = Row(quantity=quantity, value=value, unit=unit, source=source, **rest)
        self.rows.append(row)
        return row

    @property
    def missed(self) -> list[Row]:
        """Gated rows outside their tolerance."""
        return [row for row in self.rows if row.passed is False]

    def to_dict(self) -> dict[str, Any]:
        """The versioned JSON form."""
        rows = [asdict(row) | {"passed": row.passed} for row in self.rows]
        head = {"format_version": FORMAT_VERSION, "kind": "report", "title": self.title}
        return head | {"rows": rows, "notes": self.notes}

    @staticmethod
    def from_dict(table: Mapping[str, Any]) -> Report:
        """What `to_dict` gave, from another process of this version."""
        rows = [Row(**{k: v for k, v in row.items() if k != "passed"}) for row in table["rows"]]
        return Report(table["title"], rows, dict(table["notes"]))

    def save(self, path: str | Path) -> None:
        """Write the JSON form."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    def require_gates(self) -> None:
        """Raise `report/gate` naming the first missed row."""
        if self.missed:
            row = self.missed[0]
            where, rule = row.quantity, f"{len(self.missed)} gated rows missed; first target"
            value = f"{row.value} {row.unit}"
            raise GateError("report/gate", where, value, rule, legal=[row.target])

    def to_markdown(self) -> str:
        """The comparison table in Markdown."""
        return to_markdown(self.title, compare([self]))


@dataclass(frozen=True)
class Joined:
    """One quantity with what each source says of it."""

    quantity: str
    unit: str
    by_source: dict[str, Row]

    @property
    def error_frac(self) -> float | None:
        """Relative distance of the best prediction from the best observation, if both exist."""
        seen = self.by_source.get("measured") or self.by_source.get("published")
        said = self.by_source.get("simulated") or self.by_source.get("formula")
        if seen is None or said is None or not seen.value or said.value is None:
            return None
        return said.value / seen.value - 1.0

    @property
    def passed(self) -> bool | None:
        """All gates of this quantity; None without one."""
        gates = [row.passed for row in self.by_source.values() if row.passed is not None]
        return all(gates) if gates else None


def compare(reports: Iterable[Report]) -> list[Joined]:
    """Join rows of all reports by quantity and unit, in order of first appearance."""
    joined: dict[tuple[str, str], Joined] = {}
    for report in reports:
        for row in report.rows:
            key = (row.quantity, row.unit)
            joined.setdefault(key, Joined(*key, {})).by_source.setdefault(row.source, row)
    return list(joined.values())


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return "unknown" if row.value is None else f"{row.value:.6g}"


def to_table(joined: Sequence[Joined]) -> tuple[list[str], list[list[str]]]:
    """Header and cells; only sources that occur get a column."""
    sources = [s for s in SOURCES if any(s in each.by_source for each in joined)]
    header = ["quantity", "unit", *sources, "error", "gate", "note"]
    lines = []
    for each in joined:
        error = "" if each.error_frac is None else f"{each.error_frac:+.1%}"
        gate = {None: "", True: "pass", False: "MISS"}[each.passed]
        note = "; ".join(dict.fromkeys(r.note for r in each.by_source.values() if r.note))
        cells = [_cell(each.by_source.get(source)) for source in sources]
        lines.append([each.quantity, each.unit, *cells, error, gate, note])
    return header, lines


def to_markdown(title: str, joined: Sequence[Joined]) -> str:
    """A Markdown table."""
    header, lines = to_table(joined)
    out = [f"## {title}", "", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    out += ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join(out) + "\n"
