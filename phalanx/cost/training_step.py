"""Seconds of a training step on devices that are not here, for many plans at once.

`training_count` counts what a step needs; `training_price` turns the counts into seconds with the
machine's figures and the numbers of `training_efficiency`. Both are sums over columns: ten thousand
plans take a few hundredths of a second.

What is not in it: memory that runs out (`training_memory`), a network shared with other jobs,
failures and checkpoints (`goodput`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.cost.model_shape import ModelShape
from phalanx.cost.training_count import count_step
from phalanx.cost.training_efficiency import StepEfficiency, efficiency_of
from phalanx.cost.training_plans import TrainingPlans
from phalanx.cost.training_price import Speeds, context_wire, data_wires, price_step
from phalanx.hardware import Machine


@dataclass(frozen=True)
class StepTimes:
    """Seconds of N plans.

    Attributes:
        parts: what a step is spent on -> [N]; they sum to `total_s`.
        total_s, low_s, high_s: the expected step and the 90 % bar around it, [N].
        efficiency: the numbers used.
        source: where they come from.
    """

    parts: Mapping[str, np.ndarray]
    total_s: np.ndarray
    low_s: np.ndarray
    high_s: np.ndarray
    efficiency: StepEfficiency
    source: str

    def describe(self) -> str:
        """Where the efficiencies come from, in one line."""
        return self.source


def training_step(shape: ModelShape, plans: TrainingPlans, machine: Machine) -> StepTimes:
    """Price plans of one model on one kind of device.

    Args:
        shape: of the whole model.
        plans: a table of N plans; what is illegal is not checked here.
    """
    found = efficiency_of(machine, plans, shape.expert_params > 0)
    work = count_step(shape, plans, machine.devices_per_domain)
    priced = price_step(work, Speeds.of(machine, plans.precision), found.efficiency)
    parts = {name: _column(value, plans) for name, value in priced.items()}
    total_s = np.sum(list(parts.values()), axis=0)
    low_s, high_s = total_s * found.low, total_s * found.high
    return StepTimes(parts, total_s, low_s, high_s, found.efficiency, found.describe())


@dataclass(frozen=True)
class StepWires:
    """What exchanges take on their links, hidden or not, of N plans [N].

    Attributes:
        gather_s, reduce_s: of all weights and of all gradients of a rank, once.
        context_s: of a mean layer and a micro-batch, both passes.
        slowdown: seconds that compute loses per second of an exchange beside it.
        step_s: of the host, of a step.
    """

    gather_s: np.ndarray
    reduce_s: np.ndarray
    context_s: np.ndarray
    slowdown: float
    step_s: float


def step_wires(shape: ModelShape, plans: TrainingPlans, machine: Machine) -> StepWires:
    """The seconds behind what `training_step` says of exchanges, for plans that are played."""
    rates = efficiency_of(machine, plans, shape.expert_params > 0).efficiency
    work = count_step(shape, plans, machine.devices_per_domain)
    speeds = Speeds.of(machine, plans.precision)
    gather_s, reduce_s = data_wires(work, speeds, rates)
    context_s = context_wire(work, speeds, rates)
    return StepWires(
        gather_s=_column(gather_s * rates.pace, plans),
        reduce_s=_column(reduce_s * rates.pace, plans),
        context_s=_column(context_s * rates.pace, plans),
        slowdown=rates.slowdown,
        step_s=rates.step_s * rates.pace,
    )


def _column(value: Any, plans: TrainingPlans) -> np.ndarray:
    return np.broadcast_to(np.asarray(value, dtype=float), plans.shape or (1,))
