"""Fits the three numbers of `phalanx/cost/rl_efficiency.json`, and judges the fit.

    python benchmarks/fit_rl.py [--table FILE] [--write]

Method: a grid over the three, the sum of |log(predicted / measured)| of rows, no more than
`_LARGEST` of each (two rows of one source contradict their neighbours by a factor of two). Judged
by leaving out whole groups of (source, model, hardware, size).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from math import log
from pathlib import Path

import numpy as np

from phalanx.cost import rl_efficiency as table_module
from phalanx.cost.rl_efficiency import RlEfficiency, rl_efficiency
from phalanx.lab.csv_rows import seen_table
from phalanx.lab.rl_rows import RlRow, predict_rl, read_rl

TABLE = Path(table_module.__file__).with_name(table_module.TABLE)
_LARGEST = 0.6
_PRIOR = 0.01  # of the squared logarithms of both factors: towards 1 where rows do not decide
_FACTORS = np.arange(1.0, 5.01, 0.25)
_RATES = np.array([6, 8, 10, 12, 15, 18, 20, 25, 30, 40, 60]) * 1e9
_APART = np.array([1.0, 1.25, 1.5, 2.0, 2.5, 3.0])


def errors(rows: Sequence[RlRow], efficiency: RlEfficiency) -> np.ndarray:
    """log(predicted / measured) of each row."""
    steps = predict_rl(rows, efficiency)
    return np.array([log(s.total_s / row.measured_step_s) for s, row in zip(steps, rows) if s])


class Fit:
    """Rows with the parts of their steps that do not depend on the three numbers."""

    def __init__(self, rows: Sequence[RlRow]) -> None:
        self.rows = rows
        unit = replace(
            rl_efficiency(), learning_factor=1.0, packed_bytes_per_s=1.0, apart_factor=1.0
        )
        steps = [step for step in predict_rl(rows, unit) if step is not None]
        columns = zip(
            *(
                (s.generation_s, s.learning_s, s.weights_s, s.states_s, s.is_colocated)
                for s in steps
            )
        )
        self._generation, self._learning, self._weights, self._states, one_pool = (
            np.array(column) for column in columns
        )
        self._one_pool = one_pool.astype(bool)
        self._measured = np.array([row.measured_step_s for row in rows])

    def best(self, taken: Sequence[int]) -> RlEfficiency:
        """The numbers that fit the rows at these places."""
        at = np.array(taken)

        def cost(numbers: tuple[float, float, float]) -> float:
            prior = _PRIOR * (log(numbers[0]) ** 2 + log(numbers[2]) ** 2)
            return prior + float(self._errors(*numbers)[at].mean())

        factor, rate, apart = min(product(_FACTORS, _RATES, _APART), key=cost)
        return replace(
            rl_efficiency(),
            learning_factor=float(factor),
            packed_bytes_per_s=float(rate),
            apart_factor=float(apart),
        )

    def _errors(self, factor: float, rate: float, apart: float) -> np.ndarray:
        """As `RlStep.total_s`; the wire is small beside packing, and goes with it here."""
        learning = self._learning * factor
        weights = self._weights / rate / np.where(self._one_pool, 1.0, apart)
        total = np.where(
            self._one_pool,
            self._generation + learning + self._states,
            np.maximum(self._generation, learning),
        )
        errors = np.abs(np.log((total + weights) / self._measured))
        return np.minimum(errors, _LARGEST)


def left_out(fit: Fit) -> np.ndarray:
    """log(predicted / measured) of every row by a fit without its group."""
    found = np.zeros(len(fit.rows))
    for group in {row.group for row in fit.rows}:
        inside = [at for at, row in enumerate(fit.rows) if row.group == group]
        others = [at for at in range(len(fit.rows)) if at not in inside]
        found[inside] = errors([fit.rows[at] for at in inside], fit.best(others))
    return found


def main() -> None:
    """Fit, judge, print and perhaps write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, default=seen_table("training"))
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rows = [row for row in read_rl(arguments.table) if row.is_complete]
    fit = Fit(rows)
    outside = left_out(fit)
    low, high = np.quantile(np.exp(-outside), [0.05, 0.95])
    best = replace(
        fit.best(range(len(rows))),
        low=round(float(low), 3),
        high=round(float(high), 3),
        num_rows=len(rows),
        sources=dict(Counter(row.source_id for row in rows)),
        median_error=round(float(np.median(np.abs(np.expm1(outside)))), 4),
    )
    for row, out in zip(rows, outside):
        print(f"{row.group:60s} {row.measured_step_s:6.1f} s, left out {np.expm1(out):+.0%}")
    print(best.describe())
    if arguments.write:
        inside_bar = float(np.mean((np.exp(-outside) >= low) & (np.exp(-outside) <= high)))
        scores = {
            "rows": len(rows),
            "median": best.median_error,
            "p90": round(float(np.quantile(np.abs(np.expm1(outside)), 0.9)), 4),
            "bias": round(float(np.median(np.expm1(outside))), 4),
            "in_bar": round(inside_bar, 4),
        }
        classes = {"folds": len({row.group for row in rows}), "by": "whole groups"}
        table = asdict(best) | {"cross_validation": classes | {"classes": {"rl": scores}}}
        TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
