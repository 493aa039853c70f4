"""Out-of-fold scores that the fit scripts wrote beside their figures.

The shipped tables are the ones that efficiencies were fitted on, so scores on them flatter. Fit
scripts therefore also judge every group of rows by a fit that has not seen it, and keep the result.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

_FILES = (
    *("training_efficiency.json", "memory_software.json"),
    *("serving_efficiency.json", "rl_efficiency.json"),
)


class FoldScore(NamedTuple):
    """One class or quantity, out of fold; `figures` by name ("rows", "median", "in_bar", ...)."""

    name: str
    figures: Mapping[str, float]


def fold_scores() -> list[FoldScore]:
    """All that is kept; a file without such a record gives none."""
    return [score for name in _FILES for score in _of_file(name)]


class LeftOut(NamedTuple):
    """What a fit reaches on a kind of row that it has seen nothing of; medians by quantity."""

    kind: str
    name: str
    rows: int
    medians: Mapping[str, float]


def left_out() -> list[LeftOut]:
    """Whole accelerators and whole software releases, left out one at a time."""
    found = []
    for file in _FILES:
        record = _record(file)
        for kind in ("accelerator", "software"):
            for name, figures in record.get(f"{kind}_left_out", {}).items():
                medians = {key: value for key, value in figures.items() if key != "rows"}
                found.append(LeftOut(kind, name, int(figures["rows"]), medians))
    return found


def unseen_figure(scores: Sequence[FoldScore], name: str, figure: str) -> float:
    """One figure of a class, NaN where it is not kept; a median is that over sources, if kept."""
    found = next((score.figures for score in scores if score.name == name), {})
    if figure == "median" and "macro" in found:
        return found["macro"]
    return found.get(figure, float("nan"))


def _of_file(name: str) -> Iterator[FoldScore]:
    record = _record(name)
    for each, figures in record.get("classes", record).items():
        if isinstance(figures, Mapping) and "median" in figures:
            yield FoldScore(each, figures)


def _record(name: str) -> Mapping[str, Any]:
    path = files("phalanx.cost") / name
    if not path.is_file():
        return {}
    found: Mapping[str, Any] = json.loads(path.read_text()).get("cross_validation", {})
    return found
