"""At whose rates a step is played: those fitted to published runs, as `phalanx plan` prices, or the
machine's own. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from phalanx.action import Collective, Program, Send
from phalanx.cost.base import CostModel
from phalanx.cost.fitted import PlayedStep, fitted_cost
from phalanx.cost.model_shape import shape_of
from phalanx.cost.roofline import RooflineCost
from phalanx.cost.table import TableCost
from phalanx.cost.training_plans import TrainingPlans
from phalanx.cost.training_step import StepTimes, step_wires, training_step
from phalanx.errors import JobError
from phalanx.hardware import Cluster
from phalanx.job import Job
from phalanx.mesh import Mesh
from phalanx.models.config import DecoderConfig
from phalanx.planner.refined import refine
from phalanx.planner.written import idle_axes, layout_columns, schedule_of, written_plan
from phalanx.policy import Order, Spec
from phalanx.workload import StepWork

RATES = ("fitted", "machine")


@dataclass(frozen=True)
class PlayedRates:
    """Prices of a step's actions.

    Attributes:
        cost: of each.
        source: whose rates they are, in a line.
        priced_s: the step as `phalanx plan` prices this layout; None where it does not.
    """

    cost: CostModel
    source: str
    priced_s: float | None = None


def require_rates(rates: str) -> None:
    """Refuse a word that names no rates.

    Raises:
        JobError: `job/bad-value`.
    """
    if rates not in RATES:
        raise JobError("job/bad-value", "--rates", rates, "are no rates", legal=RATES)


def own_rates(job: Job, cluster: Cluster, program: Program) -> PlayedRates:
    """The job's table of costs, or what the machine's file says."""
    if job.plan.costs:
        return PlayedRates(cost_of(job, cluster, program), "seconds from the job's table of costs")
    title = cluster.machine.title
    source = f"rates of {title} as they stand, to compare orders and layouts; programs reach less"
    return PlayedRates(cost_of(job, cluster, program), source)


def fitted_rates(
    job: Job,
    cluster: Cluster,
    config: DecoderConfig,
    program: Program,
    work: StepWork,
    order: Order,
    specs: Sequence[Spec],
    stages: Sequence[Sequence[str]],
    rows: Mapping[str, Any],
) -> PlayedRates:
    """Those of the price of this layout; the machine's own where it has no price.

    Args:
        stages: names of the units of each stage.
        rows: what a price assumed of the rows (`written.ROW_COLUMNS`); {}: each micro-batch is one
            document that counts in full.
    """
    mesh, machine = program.mesh, cluster.machine
    own = own_rates(job, cluster, program)
    if idle := idle_axes(mesh, specs):
        why = f"no policy uses the axis {idle[0]!r}, so `phalanx plan` has no price to play"
        return replace(own, source=f"{own.source}; {why}")
    shape = shape_of(config)
    has_experts = any(layer.feed_forward.num_experts for layer in shape.layers)
    layout = layout_columns(mesh, order, specs, has_experts=has_experts)
    plan = written_plan(job, machine, shape, layout, played_rows(work, rows), config)
    times = training_step(shape, plan, machine)
    step = PlayedStep(
        program=program,
        work=work,
        stages=stages,
        tensor=_axes(mesh, specs, "tensor"),
        context=_axes(mesh, specs, "context"),
    )
    wires = step_wires(shape, plan, machine)
    cost = fitted_cost(step, shape, plan, times, wires, own.cost)
    known = layout["pipeline"] == 1 or bool(schedule_of(order))
    priced_s = _priced_s(plan, shape, times, stages) if known else None
    return PlayedRates(cost, f"rates: {times.describe()}", priced_s)


def played_rows(work: StepWork, rows: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of the rows of a step's micro-batches, on average."""
    micro_rows = rows.get("micro_rows", 1)
    row_tokens = float(np.mean(work.item_tokens)) / micro_rows
    found = {"micro_rows": micro_rows, "row_tokens": row_tokens, "num_micro": work.num_items}
    given = min(float(rows.get("document_tokens", row_tokens)), row_tokens)
    return {**rows, **found, "document_tokens": given}


def _axes(mesh: Mesh, specs: Sequence[Spec], family: str) -> set[str]:
    return {spec.axis for spec in specs if spec.family == family and mesh.degree(spec.axis) > 1}


def _priced_s(
    plan: TrainingPlans, shape: Any, times: StepTimes, stages: Sequence[Sequence[str]]
) -> float:
    layers = np.array([sum(".layers." in name for name in units) for units in stages])
    return float(refine(shape, plan, times, lambda chunks: layers).total_s[0])


def cost_of(job: Job, cluster: Cluster, program: Program) -> CostModel:
    """The job's table of costs, or the machine's rates: links inside a domain, network beyond."""
    if job.plan.costs:
        return TableCost(dict(job.plan.costs))
    machine, mesh = cluster.machine, program.mesh
    used = {each.axis for each in chain(*program.lists) if isinstance(each, Send | Collective)}
    axes = dict.fromkeys((*mesh.names, *sorted(used)))  # some exchanges are over several at once
    inside = {axis: _inside(mesh, axis, machine.devices_per_domain) for axis in axes}
    link, network = machine.link_bandwidth.value, machine.network_bandwidth.value
    near, far = machine.link_latency.value, machine.network_latency.value
    return RooflineCost(
        flops_per_s=machine.matmul.value,
        memory_bytes_per_s=machine.memory_bandwidth.value,
        link_bytes_per_s={axis: link if near_by else network for axis, near_by in inside.items()},
        latency_s={axis: near if near_by else far for axis, near_by in inside.items()},
        overhead_s=machine.launch_overhead.value,
    )


def _inside(mesh: Mesh, axis: str, domain: int) -> bool:
    """Whether every group of the axis lies within one domain of consecutive ranks."""
    return all(len({rank // domain for rank in group}) == 1 for group in mesh.groups(axis))
