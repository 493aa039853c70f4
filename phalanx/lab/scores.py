"""How good predictions are: errors, bias, calibration of bars; order and choice among plans.

All errors are relative: predicted over measured, minus one. Medians over rows would be those of the
largest table (one grid is half of all rows), so classes are judged by the median over sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Estimate(NamedTuple):
    """A predicted value and its 90 % bar, in SI units."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ErrorScore:
    """Of one quantity over some rows; shares, not percent.

    Attributes:
        rows: that have a measured and a predicted value.
        median, p90: of the absolute error.
        bias: median of the signed error; above 0: predicted too much.
        in_bar: rows whose measured value lies inside the 90 % bar.
        baseline: median absolute error of the constant-MFU baseline; None where there is none.
    """

    rows: int
    median: float
    p90: float
    bias: float
    in_bar: float
    baseline: float | None = None


def error_score(
    measured: Sequence[float],
    predicted: Sequence[Estimate],
    baseline: Sequence[float] = (),
) -> ErrorScore | None:
    """None without rows.

    Args:
        measured: values above 0.
        predicted: of the same rows.
        baseline: of the same rows; NaN where the baseline cannot say.
    """
    if not measured:
        return None
    truth = np.asarray(measured, dtype=float)
    value, low, high = np.asarray(predicted, dtype=float).T
    error = value / truth - 1
    beside = None
    if len(baseline):
        of_baseline = np.abs(np.asarray(baseline, dtype=float) / truth - 1)
        beside = float(np.nanmedian(of_baseline)) if np.isfinite(of_baseline).any() else None
    return ErrorScore(
        rows=len(truth),
        median=float(np.median(np.abs(error))),
        p90=float(np.quantile(np.abs(error), 0.9)),
        bias=float(np.median(error)),
        in_bar=float(np.mean((low <= truth) & (truth <= high))),
        baseline=beside,
    )


@dataclass(frozen=True)
class MacroScore:
    """Medians over sources of what `ErrorScore` says of each; `worst` is the largest median."""

    sources: int
    rows: int
    median: float
    p90: float
    bias: float
    in_bar: float
    worst: float
    baseline: float | None


def macro_score(by_source: Mapping[str, ErrorScore]) -> MacroScore | None:
    """None without sources. Bars are counted over all rows, because they speak of rows."""
    if not by_source:
        return None
    scores = list(by_source.values())
    rows = sum(score.rows for score in scores)
    beside = [score.baseline for score in scores if score.baseline is not None]
    return MacroScore(
        sources=len(scores),
        rows=rows,
        median=float(np.median([score.median for score in scores])),
        p90=float(np.median([score.p90 for score in scores])),
        bias=float(np.median([score.bias for score in scores])),
        in_bar=sum(score.in_bar * score.rows for score in scores) / rows,
        worst=max(score.median for score in scores),
        baseline=float(np.median(beside)) if beside else None,
    )


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Correlation of ranks; equal values share a rank. NaN where one side is constant."""
    ranks = [_ranks(np.asarray(values, dtype=float)) for values in (first, second)]
    spread = [rank - rank.mean() for rank in ranks]
    norm = float(np.sqrt((spread[0] ** 2).sum() * (spread[1] ** 2).sum()))
    return float((spread[0] * spread[1]).sum()) / norm if norm else float("nan")


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def top_regret(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Measured time of the plan that is predicted best, over the best measured; 1 is perfect."""
    choice = int(np.argmin(predicted))
    return float(measured[choice] / min(measured))


@dataclass(frozen=True)
class CallScore:
    """Of a yes-or-no prediction. Precision: right among those called; recall: called among true."""

    rows: int
    called: int
    true: int
    precision: float
    recall: float


def call_score(called: Sequence[bool], true: Sequence[bool]) -> CallScore | None:
    """None where nothing is true; a precision without calls is NaN."""
    said, is_so = np.asarray(called, dtype=bool), np.asarray(true, dtype=bool)
    if not is_so.any():
        return None
    right = int((said & is_so).sum())
    return CallScore(
        rows=len(said),
        called=int(said.sum()),
        true=int(is_so.sum()),
        precision=right / int(said.sum()) if said.any() else float("nan"),
        recall=right / int(is_so.sum()),
    )
