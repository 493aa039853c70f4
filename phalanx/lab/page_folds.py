"""The page's tables of rows that a fit has not seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from phalanx.lab.cross_validated import FoldScore, left_out
from phalanx.lab.markdown import QUANTITY_NAMES, percent, table, wrapped


def out_of_fold(scores: Sequence[FoldScore]) -> Iterator[str]:
    """What fits reach on rows that they have not seen; nothing without scores."""
    if not scores:
        return
    yield "## Out of fold"
    yield ""
    yield wrapped(
        "Five folds of whole groups (same source, model, hardware, size and sequence length). The "
        "median is that of all rows; targets are judged by the one over sources, where it is kept. "
        "Bars of training and of reinforcement learning are cut from these same errors, so that "
        "nine of ten lie inside by construction; those of serving and of memory are cut from the "
        "other folds."
    )
    lines = [
        [
            QUANTITY_NAMES.get(score.name, score.name),
            f"{score.figures.get('rows', 0):,.0f}",
            *(percent(score.figures.get(name)) for name in ("median", "macro", "p90")),
            percent(score.figures.get("bias"), sign=True),
            percent(score.figures.get("in_bar")),
        ]
        for score in scores
    ]
    yield from table(
        ("what", "rows", "median error", "over sources", "p90", "bias", "in 90 % bars"), lines
    )
    yield from _left_out()


def _left_out() -> Iterator[str]:
    """Medians over kinds of what a fit reaches on a kind that it has seen nothing of."""
    lines = []
    for kind in dict.fromkeys(each.kind for each in left_out()):
        of_kind = [each for each in left_out() if each.kind == kind]
        for quantity in dict.fromkeys(name for each in of_kind for name in each.medians):
            medians = [each.medians[quantity] for each in of_kind if quantity in each.medians]
            cells = [percent(float(np.median(medians))), percent(max(medians))]
            rows = f"{sum(each.rows for each in of_kind):,}"
            name = QUANTITY_NAMES.get(quantity, quantity)
            lines.append([kind, name, str(len(of_kind)), rows, *cells])
    if lines:
        yield "A whole kind left out, one at a time: what to expect of one that is new."
        header = ("left out", "quantity", "kinds", "rows", "median of medians", "worst")
        yield from table(header, lines)
