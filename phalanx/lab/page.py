"""docs/accuracy.md: the scores as a page, with what is missed and why, and what the words mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from phalanx.lab import row_class
from phalanx.lab.cross_validated import FoldScore, fold_scores, unseen_figure
from phalanx.lab.definitions import definitions
from phalanx.lab.markdown import QUANTITY_NAMES, percent, table, wrapped
from phalanx.lab.missed import REASONS, WEAK
from phalanx.lab.page_folds import out_of_fold
from phalanx.lab.scored import SourceScore, Validation
from phalanx.lab.scores import MacroScore
from phalanx.lab.targets import TARGETS, Target

_MOST_REASONS = 14


def page(found: Validation, picture: str = "", *, is_seen: bool = False) -> str:
    """Markdown.

    Args:
        found: the scores.
        picture: its path, relative to the page; "" for none.
        is_seen: the tables are those that efficiencies were fitted on, so that out-of-fold scores
            belong beside.
    """
    folds = fold_scores() if is_seen else []
    parts = (
        _head(found, picture, is_seen),
        _targets(found, folds),
        _classes(found),
        out_of_fold(folds),
        _sources(found),
        _grids(found),
        _weak() if is_seen else iter(()),
        _unpriced(found),
        definitions(),
    )
    return "\n".join(line for part in parts for line in part).rstrip() + "\n"


def figure(target: Target, value: float) -> str:
    """As the target's table prints it."""
    return percent(value) if target.is_share else ("" if value != value else f"{value:.3f}")


def in_order(found: Validation) -> list[tuple[tuple[str, str], MacroScore]]:
    """Classes as their definitions list them, serving last."""
    order = [*row_class.TRAINING_CLASSES, "serving"]
    return sorted(found.classes().items(), key=lambda item: order.index(item[0][0]))


def _head(found: Validation, picture: str, is_seen: bool) -> Iterator[str]:
    yield "# How accurate the planner is"
    yield ""
    yield "Written by `phalanx lab validate --markdown docs/accuracy.md`; do not edit."
    yield ""
    yield wrapped(
        f"{found.rows:,} published measurements were read; {found.complete:,} have the minimum "
        f"inputs (defined below), {found.predicted:,} of these were priced. Every measurement is "
        "compared with the prediction of the same code that `phalanx plan` uses. Errors are "
        "relative: predicted over measured, minus one."
    )
    if is_seen:
        yield ""
        yield wrapped(
            "These are the tables that ship with Phalanx, and efficiencies were fitted on them: a "
            "few numbers for each accelerator, precision and software, never for a row, a model "
            "or a plan. Scores on them are therefore in sample. What is said out of fold comes "
            "from fits that had not seen the group of rows they are judged by; that is what to "
            "expect of a plan that nobody has published. Even that is a little kind: formulas, and "
            "what frameworks are taken to imply, were chosen with these tables in sight."
        )
    if picture:
        yield ""
        yield f"![Predicted against measured, with the constant-MFU baseline beside]({picture})"


def _targets(found: Validation, folds: Sequence[FoldScore]) -> Iterator[str]:
    yield ""
    yield "## Targets"
    lines, missed = [], []
    for target in TARGETS:
        value = target.of(found)
        unseen = unseen_figure(folds, *target.fold)
        is_met = target.is_met(unseen if unseen == unseen else value)
        if is_met is None:
            continue
        if not is_met:
            missed.append(target.name)
        word = "met" if is_met else "**missed**"
        cells = [target.name, figure(target, value), figure(target, unseen), _bound(target), word]
        lines.append([*cells, target.others])
    header = ["figure", "Phalanx", "out of fold", "target", "", "best known of others"]
    if not folds:
        header.pop(2)
        for line in lines:
            line.pop(2)
    yield from table(header, lines)
    if missed:
        yield "What is missed, and why:"
        yield ""
        for name in missed:
            yield wrapped(f"{name}: {REASONS.get(name, 'not explained yet')}", bullet="- ")
        yield ""


def _bound(target: Target) -> str:
    if target.low == 0:
        return f"at most {figure(target, target.high)}"
    if target.high == 1:
        return f"at least {figure(target, target.low)}"
    return f"{figure(target, target.low)} to {figure(target, target.high)}"


def _classes(found: Validation) -> Iterator[str]:
    yield "## Classes"
    yield ""
    yield wrapped(
        "Medians over sources of the figures of each source, because one grid is half of all rows. "
        "The baseline is one sustained rate per accelerator, precision and class of rows, fitted "
        "on the shipped tables."
    )
    lines = [
        [
            name,
            QUANTITY_NAMES.get(quantity, quantity),
            str(score.sources),
            f"{score.rows:,}",
            percent(score.median),
            percent(score.p90),
            percent(score.bias, sign=True),
            percent(score.in_bar),
            percent(score.worst),
            percent(score.baseline),
        ]
        for (name, quantity), score in in_order(found)
    ]
    header = (
        *("class", "quantity", "sources", "rows", "median error", "p90", "bias"),
        *("in 90 % bars", "worst source", "baseline median"),
    )
    yield from table(header, lines)


def _sources(found: Validation) -> Iterator[str]:
    yield "## Sources"
    yield ""
    yield "Coverage is rows priced, of those with the minimum inputs, of all."
    lines = [line for score in found.sources for line in _source_lines(score)]
    header = (
        *("source", "class", "coverage", "quantity", "rows", "median error", "p90", "bias"),
        *("in 90 % bars", "baseline median"),
    )
    yield from table(header, lines)


def _source_lines(score: SourceScore) -> Iterator[list[str]]:
    coverage = f"{score.predicted:,} / {score.complete:,} / {score.rows:,}"
    head = [score.source_id, score.row_class, coverage]
    for quantity, error in score.errors.items():
        yield [
            *head,
            QUANTITY_NAMES.get(quantity, quantity),
            f"{error.rows:,}",
            percent(error.median),
            percent(error.p90),
            percent(error.bias, sign=True),
            percent(error.in_bar),
            percent(error.baseline),
        ]
        head = ["", "", ""]
    if not score.errors:
        yield [*head, _why_nothing(score), *[""] * 6]


def _why_nothing(score: SourceScore) -> str:
    if not score.predicted:
        return "not priced"
    if score.from_memory == score.rows:
        return "quoted from memory: not compared"
    return "prints neither times nor rates"


def _grids(found: Validation) -> Iterator[str]:
    if not found.grids:
        return
    yield "## Grids of plans"
    yield ""
    yield wrapped(
        "Groups that differ in the plan alone, of at least five runs that ended; of serving, "
        "engines of one model and accelerator at one load, by request latency. Regret: measured "
        "time of the plan that is predicted best, over the best measured. Failed choices: grids "
        "whose fastest plan predicted to fit is one that failed."
    )
    lines = []
    for source in dict.fromkeys(grid.source_id for grid in found.grids):
        grids = found.grids_of(source)
        order = [grid.spearman for grid in grids if grid.spearman == grid.spearman]
        regret = [grid.regret for grid in grids]
        call = found.memory_calls.get(source)
        lines.append(
            [
                source,
                str(len(grids)),
                f"{np.median(order):.3f}" if order else "",
                f"{min(order):.3f}" if order else "",
                f"{np.median(regret):.3f}",
                f"{max(regret):.3f}",
                str(sum(grid.choice_failed for grid in grids)),
                percent(call.precision) if call else "",
                percent(call.recall) if call else "",
            ]
        )
    header = (
        *("source", "grids", "Spearman median", "lowest", "regret median", "highest"),
        *("failed choices", "out-of-memory precision", "recall"),
    )
    yield from table(header, lines)


def _weak() -> Iterator[str]:
    yield "## Weak spots"
    yield ""
    for text in WEAK:
        yield wrapped(text, bullet="- ")
    yield ""


def _unpriced(found: Validation) -> Iterator[str]:
    reasons = found.reasons()
    if not reasons:
        return
    yield "## Rows that were not priced"
    yield ""
    yield "What they lack; a row may lack several things."
    lines = [[reason, f"{count:,}"] for reason, count in reasons.most_common(_MOST_REASONS)]
    rest = sum(reasons.values()) - sum(count for _, count in reasons.most_common(_MOST_REASONS))
    if rest:
        lines.append(["other reasons", f"{rest:,}"])
    yield from table(("reason", "rows"), lines)
