"""What a validation found: the forms that its JSON, its page and its picture are made from."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from phalanx.lab.scores import CallScore, ErrorScore, Estimate, MacroScore, macro_score

_COMPARED = (
    *("source_id", "class", "line", "quantity", "measured", "predicted", "low", "high"),
    *("error", "baseline", "reason"),
)


class Point(NamedTuple):
    """One comparison; `line` of its table, `baseline` is NaN where there is none."""

    source_id: str
    row_class: str
    line: int
    quantity: str
    measured: float
    predicted: Estimate
    baseline: float


@dataclass(frozen=True, kw_only=True)
class SourceScore:
    """Rows of one source and class.

    Attributes:
        rows: all of them; `complete`: with the minimum inputs; `predicted`: of these, priced.
        from_memory: not compared, because their values were not read from a source.
        reasons: why rows were not priced, with their number.
        errors: by quantity.
    """

    source_id: str
    row_class: str
    rows: int
    complete: int
    predicted: int
    from_memory: int
    reasons: Mapping[str, int]
    errors: Mapping[str, ErrorScore]

    @property
    def coverage(self) -> float:
        """Priced, of those with the minimum inputs; NaN where none has them."""
        return self.predicted / self.complete if self.complete else float("nan")


@dataclass(frozen=True, kw_only=True)
class GridScore:
    """Plans that differ in nothing else.

    Attributes:
        ran, failed: runs that ended, and that crashed or ran out of memory.
        spearman: of predicted and measured step times (serving: request latencies).
        regret: measured time of the predicted best over the best measured, among runs that ended.
        choice_failed: the fastest of the plans that are predicted to fit is one that failed.
    """

    source_id: str
    grid: str
    ran: int
    failed: int
    spearman: float
    regret: float
    choice_failed: bool


@dataclass(frozen=True)
class Validation:
    """All scores.

    Attributes:
        memory_calls: source -> the call "out of memory" against runs that failed.
        points: what scores were made from, in the order of the tables.
        unpriced: (source, class, line, reason) of the other rows.
    """

    sources: Sequence[SourceScore]
    grids: Sequence[GridScore]
    memory_calls: Mapping[str, CallScore]
    points: Sequence[Point]
    unpriced: Sequence[tuple[str, str, int, str]] = ()

    def by_source(
        self, quantity: str, row_class: str = "", source: str = ""
    ) -> dict[str, ErrorScore]:
        """Scores of a quantity, of one class or all, of sources whose names start with `source`."""
        return {
            f"{score.source_id}, {score.row_class}": score.errors[quantity]
            for score in self.sources
            if quantity in score.errors
            and row_class in ("", score.row_class)
            and score.source_id.startswith(source)
        }

    def classes(self) -> dict[tuple[str, str], MacroScore]:
        """(class, quantity) -> medians over sources, in the order of the tables."""
        keys = dict.fromkeys(
            (score.row_class, quantity) for score in self.sources for quantity in score.errors
        )
        found = {(name, what): macro_score(self.by_source(what, name)) for name, what in keys}
        return {key: score for key, score in found.items() if score is not None}

    def grids_of(self, source: str) -> list[GridScore]:
        """Grids of sources whose names start with `source`."""
        return [grid for grid in self.grids if grid.source_id.startswith(source)]

    @property
    def rows(self) -> int:
        """Of all tables."""
        return sum(score.rows for score in self.sources)

    @property
    def complete(self) -> int:
        """Rows with the minimum inputs."""
        return sum(score.complete for score in self.sources)

    @property
    def predicted(self) -> int:
        """Rows that were priced."""
        return sum(score.predicted for score in self.sources)

    def reasons(self) -> Counter[str]:
        """Why rows were not priced, with their number; a row may lack several things."""
        found: Counter[str] = Counter()
        for score in self.sources:
            for reason, count in score.reasons.items():
                head, _, items = reason.partition("insufficient input: ")
                for each in items.split("; ") if items else [head]:
                    found[f"without {each}" if items else each] += count
        return found

    def to_dict(self) -> dict[str, Any]:
        """Everything but the points, in forms that JSON has; NaN becomes null."""
        return plain(
            {
                "rows": self.rows,
                "complete": self.complete,
                "predicted": self.predicted,
                "classes": [
                    {"class": name, "quantity": quantity} | asdict(score)
                    for (name, quantity), score in self.classes().items()
                ],
                "sources": [asdict(score) | {"coverage": score.coverage} for score in self.sources],
                "grids": [asdict(grid) for grid in self.grids],
                "memory_calls": {name: asdict(call) for name, call in self.memory_calls.items()},
            }
        )


def comparisons_csv(found: Validation) -> str:
    """Every comparison and every row without one, as a table: for whoever wants to know why."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_COMPARED)
    for point in found.points:
        error = point.predicted.value / point.measured - 1
        numbers = (point.measured, *point.predicted, error, point.baseline)
        cells = ["" if each != each else f"{each:.6g}" for each in numbers]
        writer.writerow((*point[:4], *cells, ""))
    for source, row_class, line, reason in found.unpriced:
        writer.writerow((source, row_class, line, *[""] * 7, reason))
    return out.getvalue()


def plain(value: Any) -> Any:
    """JSON has no NaN: null stands for a figure that cannot be given."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and value != value else value
