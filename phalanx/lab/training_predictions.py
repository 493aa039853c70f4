"""What the cost models say of published rows, before they are compared with what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.cost.training_memory import training_memory
from phalanx.cost.training_step import training_step
from phalanx.errors import PhalanxError
from phalanx.lab.scores import Estimate
from phalanx.lab.training_rows import Batch, TrainingRow, batches


@dataclass(frozen=True)
class TrainingPrediction:
    """Of one row.

    Attributes:
        step_s: with its bar; None where there is no prediction.
        memory_bytes: of these, what the software's own log would print as its peak.
        fits: the chance that the fullest device holds the plan.
        reason: why there is no prediction.
    """

    step_s: Estimate | None = None
    memory_bytes: Estimate | None = None
    fits: float = float("nan")
    reason: str = ""


def predict_training(rows: Sequence[TrainingRow]) -> list[TrainingPrediction]:
    """Predictions of rows, in their order; a row that cannot be priced says why."""
    found = {id(row): unpriced(row) for row in rows}
    for batch in batches(rows):
        found.update(zip(map(id, batch.rows), _priced_or_told(batch)))
    return [found[id(row)] for row in rows]


def _priced_or_told(batch: Batch) -> list[TrainingPrediction]:
    """A row that cannot be priced says why; it costs the others of its batch nothing."""
    try:
        return _priced(batch)
    except PhalanxError as error:
        if len(batch.rows) == 1:
            return [TrainingPrediction(reason=error.sentence())]
    return [made for row in batch.rows for made in _priced_or_told(*batches([row]))]


def unpriced(row: TrainingRow) -> TrainingPrediction:
    """Why a row cannot be priced; nothing for one that can."""
    if row.missing:
        return TrainingPrediction(reason=f"insufficient input: {'; '.join(row.missing)}")
    if row.machine is None:
        return TrainingPrediction(reason=f"unknown accelerator: {row.hardware}")
    return TrainingPrediction()


def _priced(batch: Batch) -> list[TrainingPrediction]:
    times = training_step(batch.shape, batch.plans, batch.machine)
    memory = training_memory(batch.shape, batch.plans, batch.machine)
    fits = np.broadcast_to(memory.fits_probability(batch.machine.memory.value), len(batch.rows))
    step = _estimates(times.total_s, times.low_s, times.high_s, len(batch.rows))
    bar = (memory.logged_low_bytes, memory.logged_high_bytes)
    peak = _estimates(memory.logged_bytes, *bar, len(batch.rows))
    return [
        TrainingPrediction(
            step_s=step[at],
            memory_bytes=peak[at],
            fits=float(fits[at]),
        )
        for at in range(len(batch.rows))
    ]


def _estimates(value: np.ndarray, low: np.ndarray, high: np.ndarray, rows: int) -> list[Estimate]:
    columns = (np.broadcast_to(each, rows) for each in (value, low, high))
    return [Estimate(*(float(each) for each in bar)) for bar in zip(*columns)]
