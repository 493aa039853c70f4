"""The constant-MFU baseline: what one number per accelerator and precision predicts.

Useful FLOPs of a step over a sustained rate per device: the median over the rows of the tables that
Phalanx ships. Each class of rows has a constant of its own, which is the best that can be done for
the baseline: a maker's best dense plan says nothing about a mixture of experts or a sweep of plans.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from phalanx.lab.csv_rows import seen_table
from phalanx.lab.training_rows import TrainingRow, read_training

_PASSES = {"lora": 2.0}  # forward and the gradient of activations; others: and of weights


def useful_flops(row: TrainingRow) -> float:
    """Of a step: products with weights, the head, and attention over the keys that are seen."""
    assert row.shape is not None and row.plans is not None
    seen = float(row.plans.document_tokens)
    per_token = row.shape.product_flops_per_token + row.shape.head_flops_per_token
    forward = per_token + row.shape.attention_flops(1.0, seen / 2, seen)
    return _PASSES.get(row.plans.method, 3.0) * forward * row.tokens_per_step


@dataclass(frozen=True)
class ConstantRate:
    """Sustained useful FLOP/s of a device, by (machine, precision, class of rows)."""

    flops_per_s: dict[tuple[str, str, str], float]

    def step_s(self, row: TrainingRow) -> float:
        """Seconds of a step; NaN for what no shipped row has."""
        if row.machine is None or row.plans is None:
            return float("nan")
        rate = self.flops_per_s.get((row.machine.name, row.precision, row.row_class))
        return useful_flops(row) / (row.devices * rate) if rate else float("nan")


def fit_constant_rate(rows: Sequence[TrainingRow]) -> ConstantRate:
    """Medians over rows."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in rows:
        if row.is_fitted and row.measured_step_s and row.machine is not None:
            key = (row.machine.name, row.precision, row.row_class)
            found[key].append(useful_flops(row) / (row.devices * row.measured_step_s))
    return ConstantRate({key: float(np.median(rates)) for key, rates in found.items()})


@cache
def shipped_rate() -> ConstantRate:
    """Fitted on the tables that Phalanx ships."""
    return fit_constant_rate(read_training(seen_table("training")))
