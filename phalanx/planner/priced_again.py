"""A plan of a cluster with some of its columns changed, priced like all others."""

from __future__ import annotations

from typing import Any

import numpy as np

from phalanx.cost.training_step import training_step
from phalanx.hardware import Cluster
from phalanx.planner.answers import PricedPlan, SizedPlan, priced_plan
from phalanx.planner.columns import Table
from phalanx.planner.sized import sized_table
from phalanx.planner.training import Training


def priced_again(
    training: Training, cluster: Cluster, sized: SizedPlan, **columns: Any
) -> PricedPlan:
    """The plan with its longest row as long as it may be.

    Args:
        training: the job, or one like it in another precision.
        columns: of `TrainingPlans`, instead of the plan's own.
    """
    values = {name: each for name, each in sized.row.items() if name != "expert_imbalance"}
    values |= columns
    values["longest_tokens"] = sized.row_limit / values["micro_rows"]
    values["row_limit"] = sized.row_limit
    table = Table({name: np.array([value]) for name, value in values.items()})
    again = sized_table(training, cluster, table, {})
    times = training_step(training.shape, again.plans, cluster.machine)
    return priced_plan(again.at(0), times, 0)
