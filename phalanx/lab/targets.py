"""What the planner must reach on rows that no fit has seen, and what the best tools known reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.lab.scored import Validation

_LEAST_IN_BARS = 20  # comparisons; of fewer, nine in ten is not a number of them


@dataclass(frozen=True)
class Target:
    """One demand.

    Attributes:
        name: of the figure.
        low, high: between which it must lie.
        others: the best that is known of other tools, with its source.
        of: the figure of a validation; NaN where its tables have no such rows.
        is_share: printed in percent.
        fold: class and figure of the out-of-fold scores that say the same.
    """

    name: str
    low: float
    high: float
    of: Callable[[Validation], float]
    others: str = ""
    is_share: bool = True
    fold: tuple[str, str] = ("", "")

    def is_met(self, value: float) -> bool | None:
        """None where there is nothing to judge."""
        return None if value != value else self.low <= value <= self.high


def _median(quantity: str, row_class: str = "", source: str = "") -> Callable[[Validation], float]:
    def of(found: Validation) -> float:
        medians = [score.median for score in found.by_source(quantity, row_class, source).values()]
        return float(np.median(medians)) if medians else float("nan")

    return of


def _grids(field: str, source: str) -> Callable[[Validation], float]:
    def of(found: Validation) -> float:
        values = [getattr(grid, field) for grid in found.grids_of(source)]
        return float(np.nanmedian(values)) if values else float("nan")

    return of


def _call(field: str, source: str) -> Callable[[Validation], float]:
    def of(found: Validation) -> float:
        calls = [call for name, call in found.memory_calls.items() if name.startswith(source)]
        return getattr(calls[0], field) if calls else float("nan")

    return of


def _coverage(found: Validation) -> float:
    return found.predicted / found.complete if found.complete else float("nan")


def _in_bars(found: Validation) -> float:
    inside = [
        point.predicted.low <= point.measured <= point.predicted.high for point in found.points
    ]
    return float(np.mean(inside)) if len(inside) >= _LEAST_IN_BARS else float("nan")


TARGETS: Sequence[Target] = (
    Target(
        *("dense vendor-tuned: step time, median error", 0, 0.06),
        _median("step_s", "vendor-tuned"),
        "5.7 %: one MFU constant, in sample; 3.7 % mean: Calculon on 8 rows",
        fold=("vendor-tuned", "median"),
    ),
    Target(
        *("vTrain grids: step time, median error", 0, 0.08),
        _median("step_s", "grid", "vtrain_"),
        fold=("vtrain", "median"),
    ),
    Target(
        *("vTrain grids: Spearman, median", 0.95, 1),
        _grids("spearman", "vtrain_"),
        fold=("vtrain", "spearman"),
        is_share=False,
    ),
    Target(
        *("nanotron grid: top-1 regret, median", 1, 1.15),
        _grids("regret", "nanotron_"),
        fold=("nanotron", "regret"),
        is_share=False,
    ),
    Target(
        *("nanotron grid: Spearman, median", 0.85, 1),
        _grids("spearman", "nanotron_"),
        fold=("nanotron", "spearman"),
        is_share=False,
    ),
    Target(
        *("nanotron grid: out-of-memory precision", 0.9, 1),
        _call("precision", "nanotron_"),
        fold=("memory", "oom_precision"),
    ),
    Target(
        *("nanotron grid: out-of-memory recall", 0.9, 1),
        _call("recall", "nanotron_"),
        fold=("memory", "oom_recall"),
    ),
    Target(
        *("peak memory, median error", 0, 0.06),
        _median("memory_bytes"),
        "4.8 %: SimuMax, A100 (claimed)",
        fold=("memory", "median"),
    ),
    Target(
        *("MoE: step time, median error", 0, 0.12),
        _median("step_s", "moe"),
        "8 to 13 %: SimuMax, Primus (claimed)",
        fold=("moe", "median"),
    ),
    Target(
        *("LoRA: step time, median error", 0, 0.12),
        _median("step_s", "lora"),
        "none found",
        fold=("lora", "median"),
    ),
    Target(
        *("serving: TPOT, median error", 0, 0.15),
        _median("tpot_s", "serving"),
        "18 % at 55 % coverage: AIConfigurator 0.12",
        fold=("tpot_s", "median"),
    ),
    Target(
        *("serving: request latency, median error", 0, 0.15),
        _median("latency_s", "serving"),
        "16 % at 55 % coverage: AIConfigurator 0.12",
        fold=("latency_s", "median"),
    ),
    Target(
        *("serving: TTFT, median error", 0, 0.30),
        _median("ttft_s", "serving"),
        "53 % at 55 % coverage: AIConfigurator 0.12",
        fold=("ttft_s", "median"),
    ),
    Target(*("rows with the minimum inputs that are predicted", 0.95, 1), _coverage),
    Target(*("rows inside their 90 % bars", 0.85, 0.95), _in_bars),
)


def judged(found: Validation) -> list[dict[str, Any]]:
    """Every target with what was found; `met` is None where the tables have no such rows."""
    values = [(target, target.of(found)) for target in TARGETS]
    return [
        {
            "name": target.name,
            "value": None if value != value else value,
            "low": target.low,
            "high": target.high,
            "met": target.is_met(value),
        }
        for target, value in values
    ]
