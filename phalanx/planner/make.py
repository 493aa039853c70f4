"""A plan from a job and a cluster: policies, mesh, program, prices. No torch.

The plan follows what `[plan]` names; searching for better ones builds on the same parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from phalanx.action import Program
from phalanx.check import check_program
from phalanx.cost.base import CostModel
from phalanx.cost.pipeline_parts import Pipeline
from phalanx.errors import JobError, PlanError, shown
from phalanx.hardware import Cluster, parse_cluster
from phalanx.job import Job
from phalanx.layout.stage_split import job_stages
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.models.adapter_folder import lora_of
from phalanx.models.config import DecoderConfig
from phalanx.plan import Plan, Pool, RoleProgram
from phalanx.planner.kept import with_recompute
from phalanx.planner.played_rates import fitted_rates, own_rates, require_rates
from phalanx.planner.work import work_of
from phalanx.planner.written import splits_tokens
from phalanx.policy import Order, Spec
from phalanx.registry import build
from phalanx.strict import read_value
from phalanx.workload import StepWork

# AdamW keeps fp32 moments; gradients are kept in fp32; half-precision weights that are trained
# keep an fp32 master copy.
_GRADIENT_BYTES, _MOMENT_BYTES, _MASTER_BYTES = 4, 8, 4


@dataclass(frozen=True)
class Planned:
    """A plan with what it was made from.

    Attributes:
        plan: the lockfile.
        program: one step as actions, checked.
        work: the step in numbers.
        cluster: the devices.
        cost: prices of actions on them.
        rates: whose they are, in a line.
        priced_s: the step as `phalanx plan` prices this layout; None where it does not.
        again_bytes: that a rank needs while it computes again what its layers have not kept.
        offloads: moments and master weights wait outside the device.
    """

    plan: Plan
    program: Program
    work: StepWork
    cluster: Cluster
    cost: CostModel
    rates: str
    priced_s: float | None = None
    again_bytes: float = 0.0
    offloads: bool = False

    def held_bytes(self, rank: int) -> float:
        """Bytes that `rank` keeps through the whole step: weights, gradients, optimizer state."""
        index = self.program.list_of_rank[rank]
        params = _note(self.program, "local_params")[index]
        trained = _note(self.program, "local_trainable")[index]
        master = _MASTER_BYTES if self.work.param_bytes < _MASTER_BYTES else 0
        states = 0 if self.offloads else _MOMENT_BYTES + master
        per_trained = _GRADIENT_BYTES + states
        return float(params * self.work.param_bytes + trained * per_trained)


def _note(program: Program, name: str) -> Sequence[int]:
    value = program.notes[name]
    assert isinstance(value, tuple)
    return value


def make_plan(
    job: Job,
    config: DecoderConfig | None = None,
    on: str = "",
    *,
    rates: str = "fitted",
    rows: Mapping[str, Any] | None = None,
) -> Planned:
    """Plan the training role of a job.

    Args:
        job: what is asked.
        config: sizes of the model; None for 'toy'.
        on: cluster shorthand, instead of `plan.on`.
        rates: "fitted": those of published runs, as `phalanx plan` prices the layout of a model; a
            toy or a job with a table of costs is played at its own. "machine": as the machine's
            file says.
        rows: as `played_rates.fitted_rates`.

    Raises:
        JobError: `mesh/product`, unknown policies or options, a cluster that is not known.
        PlanError: an order or a combination that cannot exist; a program that would hang.
    """
    require_rates(rates)
    cluster = parse_cluster(on or job.plan.on)
    mesh = mesh_of(job, cluster.num_devices)
    order_table, spec_tables = policy_tables(job, mesh)
    order: Order = build("pipeline", _options(order_table), "plan.pipeline")
    specs: list[Spec] = [
        build(str(table["family"]), _options(table), f"plan.{table['family']}")
        for table in spec_tables
    ]
    work = work_of(job, mesh, config)
    stages = _stages(job, config, order, mesh, [unit.name for unit in work.units])
    again_bytes = 0.0
    if config is not None:
        lora = lora_of(job, config)
        work, again = with_recompute(work, config, job.plan.recompute, lora)
        again_bytes = again * _again_tokens(work, mesh, order, specs, stages, job.plan.recompute)
    program = lower(work, mesh, order, specs, grain=job.plan.grain, stages=stages)
    check_program(program)
    played = own_rates(job, cluster, program)
    if stages is not None and config is not None and rates == "fitted" and not job.plan.costs:
        played = fitted_rates(job, cluster, config, program, work, order, specs, stages, rows or {})
    role = RoleProgram(
        pool="all",
        mesh=mesh.to_dict(),
        specs=spec_tables,
        order=order_table,
        batch={"item_tokens": list(work.item_tokens)},
        dtypes={"params": job.model.dtype, "reduce": "float32"},
        device="cuda",
    )
    plan = Plan(
        job=job.name,
        job_key=job.result_key,
        asked=job.result_table,
        hardware=cluster.to_dict(),
        pools={"all": Pool(machine=cluster.machine.name, devices=tuple(range(mesh.size)))},
        programs={"train": role},
    )
    return Planned(
        plan=plan,
        program=program,
        work=work,
        cluster=cluster,
        cost=played.cost,
        rates=played.source,
        priced_s=played.priced_s,
        again_bytes=again_bytes,
        offloads=job.plan.offload != "none",
    )


def _again_tokens(
    work: StepWork,
    mesh: Mesh,
    order: Order,
    specs: Sequence[Spec],
    stages: Sequence[Sequence[str]] | None,
    recompute: str,
) -> float:
    """Tokens of a rank whose layers are computed again at a time, counted once for each layer: one
    layer, but all of a stage where weight gradients are a pass of their own."""
    parts = prod(mesh.degree(spec.axis) for spec in specs if spec.family == "context")
    parts *= prod(mesh.degree(spec.axis) for spec in specs if splits_tokens(spec))
    lists = order.order(mesh.degree("pp"), work.num_items)
    layers = 1
    if stages and recompute == "full" and any(s.kind == "W" for steps in lists for s in steps):
        layers = max(1, *(sum(".layers." in name for name in units) for units in stages[1:]))
    return max(work.item_tokens) / parts * layers


def _stages(
    job: Job, config: DecoderConfig | None, order: Order, mesh: Mesh, names: Sequence[str]
) -> Sequence[Sequence[str]] | None:
    """The units of each stage, cut as training cuts them; None: equal layers of a toy.

    Args:
        names: of all units, in model order.
    """
    num_ranks, given = mesh.degree("pp"), job.plan.stages
    num_stages = order.num_stages(num_ranks)
    if config is None:
        return _toy_stages(names, num_stages, given) if given else None
    ranges = job_stages(config, num_stages, num_ranks, given, lora=lora_of(job, config))
    each = [(stage.start, stage.stop) for stage in ranges]
    return Pipeline.of(config, order, num_ranks, each).units_by_stage(names)


def _toy_stages(names: Sequence[str], num_stages: int, given: Sequence[int]) -> list[Sequence[str]]:
    if len(given) != num_stages or sum(given) != len(names) or min(given) < 1:
        rule = f"must hold {len(names)} layers in {num_stages} stages"
        raise PlanError("plan/illegal", "plan.stages", list(given), rule)
    return [names[start:stop] for start, stop in pairwise([0, *accumulate(given)])]


def mesh_of(job: Job, num_devices: int) -> Mesh:
    """The job's mesh, or all devices on the axis "shard".

    Raises:
        JobError: `mesh/product` when the axes do not multiply to the devices.
    """
    count = job.plan.devices or num_devices
    mesh = Mesh(dict(job.plan.mesh)) if job.plan.mesh else Mesh(shard=count)
    mesh.require_devices(count, "plan.mesh")
    return mesh


def policy_tables(job: Job, mesh: Mesh) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The order and the specs of `[plan]` as tables with family, name and options.

    A spec without a named axis takes its own default; specs on axes that the mesh lacks are left
    to `lower`, which refuses them, except the default data spec of a job that names none.

    Raises:
        JobError: `job/bad-value` for what is neither a name nor a table, `job/unknown-key` for a
            table that names a family itself.
    """
    order = _table("pipeline", job.plan.pipeline)
    data = job.plan.data if isinstance(job.plan.data, list) else [job.plan.data]
    if "plan.data" not in job.origin and "shard" not in mesh.names:
        data = []
    chosen = [("data", entry) for entry in data]
    context = job.plan.context if isinstance(job.plan.context, list) else [job.plan.context]
    chosen += [("tensor", job.plan.tensor), *(("context", entry) for entry in context)]
    specs = [_table(family, entry) for family, entry in chosen if entry]
    return order, specs


def _table(family: str, entry: Any) -> dict[str, Any]:
    where = f"plan.{family}"
    given = read_value(entry, str | Mapping[str, Any], where)
    options = {"name": given} if isinstance(given, str) else given
    if "family" in options:
        rule = f"the key {family!r} of [plan] says it already"
        raise JobError("job/unknown-key", f"{where}.family", shown(options["family"]), rule)
    return {"family": family} | options


def _options(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != "family"}


def plan_table(plan: Plan) -> dict[str, Any]:
    """The plan as plain tables, for JSON."""
    return asdict(plan)
