"""Recomputation that a published row does not name: what its run could not have fitted without."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from phalanx.cost.model_shape import ModelShape
from phalanx.cost.training_memory import training_memory
from phalanx.cost.training_plans import RECOMPUTE, TrainingPlans
from phalanx.hardware import Machine
from phalanx.lab.csv_rows import CsvRow
from phalanx.lab.row_measured import has_failed
from phalanx.lab.row_software import family_of

_IMPOSSIBLE = 0.02  # chance to fit below which the run must have saved memory


def recomputing(
    row: CsvRow, shape: ModelShape, plans: TrainingPlans, machine: Machine
) -> TrainingPlans:
    """The plan, with whole layers recomputed where that is implied.

    Implied: the row names nothing, its run ended, its framework's recipes recompute rather than
    offload, and the plan cannot fit the device without. Of dense models: runs of mixtures of
    experts are as fast as if nothing were repeated, so what they save is something else.
    """
    is_named = bool(row.get("recompute")) or has_failed(row)
    if is_named or not family_of(row).recomputes or shape.expert_params:
        return plans
    chance = training_memory(shape, plans, machine).fits_probability(machine.memory.value)
    if float(np.max(chance)) >= _IMPOSSIBLE:
        return plans
    return replace(plans, recompute=np.asarray(RECOMPUTE.index("full")))
