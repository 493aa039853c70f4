"""What narrower products would make of a plan: the same plan in fp8 where a machine has units."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from phalanx.cost.training_step import training_step
from phalanx.hardware import Machine
from phalanx.planner.answers import Answer, PricedPlan, priced_plan
from phalanx.planner.columns import Table
from phalanx.planner.sized import sized_table

PRECISION = "fp8"


def has_units(machine: Machine, precision: str) -> bool:
    """Whether a machine multiplies in a precision at a rate of its own."""
    known = {"fp8": machine.fp8_matmul or machine.fp8_peak}
    known["fp4"] = machine.fp4_matmul or machine.fp4_peak
    return precision in ("bf16", "fp16") or known.get(precision) is not None


def in_fp8(answer: Answer) -> PricedPlan | None:
    """The best plan of a cluster with fp8 products; None where that is not asked for or not there:
    adapters, other precisions, machines without units, no plan, no room for the copies."""
    training, cluster = answer.training, answer.asked.cluster
    is_open = training.precision == "bf16" and training.method != "lora"
    if answer.best is None or not is_open or not has_units(cluster.machine, PRECISION):
        return None
    sized = answer.best.sized
    values = {name: value for name, value in sized.row.items() if name != "expert_imbalance"}
    values["longest_tokens"] = sized.row_limit / sized.row["micro_rows"]
    values["row_limit"] = sized.row_limit
    table = Table({name: np.array([value]) for name, value in values.items()})
    narrow = sized_table(replace(training, precision=PRECISION), cluster, table, {})
    if narrow.memory.peak_bytes[0] > answer.limit_bytes:
        return None
    times = training_step(training.shape, narrow.plans, cluster.machine)
    return priced_plan(narrow.at(0), times, 0)
