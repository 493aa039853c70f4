"""What narrower products would make of a plan: the same plan in fp8 where a machine has units."""

from __future__ import annotations

from dataclasses import replace

from phalanx.hardware import Machine
from phalanx.planner.answers import Answer, PricedPlan
from phalanx.planner.priced_again import priced_again

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
    narrow = priced_again(replace(training, precision=PRECISION), cluster, answer.best.sized)
    return narrow if narrow.sized.peak_bytes <= answer.limit_bytes else None
