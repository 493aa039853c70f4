"""A priced job as files: the lockfile that `phalanx train` is given, or those of other programs.

The trainer plans with rates that it measures itself; what it takes from a priced plan is the way
that the job is laid on the devices (`layout_keys`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain, islice
from typing import Any

from phalanx.cost.training_plans import TrainingPlans
from phalanx.errors import JobError, PlanError
from phalanx.job import Job
from phalanx.plan import Plan, Pool, RoleProgram
from phalanx.planner.answers import Answer, PricedPlan
from phalanx.planner.emitters import Site, emit, plan_of, priced_as
from phalanx.planner.lock_place import device_of, hardware_of, require_place
from phalanx.planner.priced_again import priced_again
from phalanx.planner.priced_job import PricedJob
from phalanx.planner.training import Training
from phalanx.planner.written import ROW_COLUMNS
from phalanx.report import Report
from phalanx.units import format_bytes

_MOST_TRIED = 4000  # plans, of which only other kinds are written
_WORDED = (
    *("tensor", "pipeline", "context", "expert", "expert_tensor", "data", "shard", "zero"),
    *("keeps_gathered", "virtual", "schedule", "context_kind", "sequence_parallel"),
    *("recompute", "offload"),
)


def lockfile(priced: PricedJob, chosen: Answer) -> Plan:
    """The plan of one cluster: the best one that `phalanx train` runs.

    Raises:
        JobError: `job/bad-value` where none that fits does.
    """
    best = chosen.runnable
    if best is None:
        assert chosen.best is not None
        needs = ", ".join(chosen.best.sized.missing)
        rule = f"no plan that fits {chosen.asked.text} can be run by `phalanx train` yet: {needs}"
        raise JobError("job/bad-value", "--output", chosen.asked.text, rule)
    cluster, training = chosen.asked.cluster, priced.training
    layout = best.sized.layout(training)
    rows: dict[str, Any] = {name: best.sized.row[name] for name in ROW_COLUMNS}
    if training.software:
        rows["software"] = training.software
    batch: dict[str, Any] = {"row_tokens": best.sized.row_limit, "priced": rows}
    if layout.offloads:  # where the host is the device, a file is what is outside
        batch["offload"] = "file" if device_of(cluster) == "cpu" else "host"
    role = RoleProgram(
        pool="all",
        mesh=layout.mesh.to_dict(),
        specs=layout.tables(),
        order=layout.schedule or {},
        batch=batch,
        dtypes={
            "compute": priced.job.model.dtype,
            "master": priced.job.train.master_dtype,
            "reduce": "float32",
        },
        recompute=best.sized.recompute,
        device=device_of(cluster),
    )
    return Plan(
        job=priced.job.name,
        job_key=priced.job.result_key,
        asked=priced.job.result_table,
        hardware=hardware_of(cluster),
        pools={
            "all": Pool(machine=cluster.machine.name, devices=tuple(range(cluster.num_devices)))
        },
        programs={"train": role},
        predictions=[asdict(row) for row in _predicted(priced, chosen, best).rows],
    )


def layout_keys(plan: Plan, job: Job) -> dict[str, Any]:
    """Keys of `[plan]` that lay a job out as a priced plan does; none for a lockfile of a run,
    which is run as it stands.

    Raises:
        PlanError: as `Plan.require_here`: made for other devices, other libraries, another job.
    """
    role = plan.program("train")
    if "rates" in plan.hardware:
        return {}
    require_place(plan, role.grid().size, job)
    return laid_out(plan)


def laid_out(plan: Plan) -> dict[str, Any]:
    """The same keys, wherever the plan is to be played."""
    role = plan.program("train")
    keys: dict[str, Any] = {
        "plan.mesh": dict(role.mesh),
        "plan.data": _options(role, "data"),
        "plan.recompute": role.recompute,
        "plan.row_tokens": role.batch["row_tokens"],
    }
    keys |= {"plan.offload": role.batch["offload"]} if "offload" in role.batch else {}
    tensor, context = _options(role, "tensor"), _options(role, "context")
    keys |= {"plan.tensor": tensor[0]} if tensor else {}
    keys |= {"plan.context": context[0]} if context else {}
    order = {name: value for name, value in role.order.items() if name != "family"}
    return keys | ({"plan.pipeline": order} if order else {})


def _options(role: RoleProgram, family: str) -> list[dict[str, Any]]:
    """The specs of a family as keys of `[plan]` give them."""
    found = [dict(spec) for spec in role.specs if spec["family"] == family]
    return [{name: value for name, value in spec.items() if name != "family"} for spec in found]


def foreign_files(
    priced: PricedJob, chosen: Answer, target: str
) -> tuple[PricedPlan, Mapping[str, str]]:
    """The best plan of a cluster that another program has words and memory for, and its files:
    name -> text.

    A program that packs rows itself fills them all: the plan is priced with full rows, as many a
    step as come nearest to its tokens.

    Raises:
        JobError: `registry/unknown` for a target that is not known.
        PlanError: `emit/impossible` where it has words for none: what it says of the best; where
            full rows of none fit.
    """
    assert chosen.best is not None
    packs = chosen.training.profile is not None and bool(priced_as(target))
    refused: PlanError | None = None
    seen: set[tuple[float, ...]] = set()
    for plan in islice(chain([chosen.best], chosen.ranked), _MOST_TRIED):
        kind = tuple(plan.sized.row[name] for name in _WORDED)
        if kind in seen:
            continue
        seen.add(kind)
        full = _with_full_rows(chosen, plan) if packs else plan
        try:
            _require_room(chosen, full, target)
            return full, _emitted(priced, chosen, full, target)
        except PlanError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _with_full_rows(chosen: Answer, plan: PricedPlan) -> PricedPlan:
    """The plan as a program runs it that packs every row to its limit."""
    sized, training = plan.sized, chosen.training
    rows = training.batch_tokens / (sized.row["data"] * sized.row_limit)
    columns = {"row_tokens": sized.row_limit / sized.row["micro_rows"]}
    columns["num_micro"] = max(1, round(rows))
    return priced_again(training, chosen.asked.cluster, sized, **columns)


def _require_room(chosen: Answer, plan: PricedPlan, target: str) -> None:
    """Refuse what full rows do to a plan: no memory for them, or too few for its pipeline."""
    sized = plan.sized
    if sized.peak_bytes > chosen.limit_bytes:
        needed, limit = format_bytes(sized.peak_bytes), format_bytes(chosen.limit_bytes)
        rule = f"rows that {target} packs full need {needed} of {limit}"
        raise PlanError("emit/impossible", "rows", sized.row_limit, rule)
    if sized.row["num_micro"] < sized.row["pipeline"]:
        rule = f"rows that {target} packs full are too few for {sized.row['pipeline']:g} stages"
        raise PlanError("emit/impossible", "rows", sized.row_limit, rule)


def _emitted(priced: PricedJob, chosen: Answer, plan: PricedPlan, target: str) -> Mapping[str, str]:
    training, cluster = priced.training, chosen.asked.cluster
    precision = cluster.machine.half if training.precision == "bf16" else training.precision
    row: dict[str, Any] = dict(plan.sized.row)
    if training.profile is not None:
        row["row_tokens"] = plan.sized.row_limit / row["micro_rows"]
        row["num_micro"] = max(1, round(row["num_micro"]))
    plans = TrainingPlans(
        **row,
        method=training.method,
        lora_rank=training.lora.rank if training.lora else 0,
        base_bits=training.base_bits,
        precision=precision,
    )
    per_node = min(cluster.num_devices, cluster.machine.devices_per_host)
    site = Site(accelerator=cluster.machine.name.upper(), devices_per_node=per_node)
    length = {"epochs": training.epochs} if training.epochs else {}
    if not length and training.num_steps > 1:
        length = {"steps": training.num_steps}
    source = plan_of(
        priced.job, plans, 0, training.shape, length, step_documents=_step_documents(training)
    )
    return emit(target, source, site)


def _step_documents(training: Training) -> int:
    """Of a data file, on average; 0 for rows of one length."""
    if training.profile is None:
        return 0
    samples = training.profile.samples
    return max(1, round(training.batch_tokens * len(samples) / samples.num_tokens))


def _predicted(priced: PricedJob, chosen: Answer, best: PricedPlan) -> Report:
    report = Report("prediction")
    step_s, steps = best.total_s, priced.training.num_steps
    report.add("training/step time", step_s, "s", "formula", note=chosen.source)
    report.add("training/all steps", step_s * steps, "s", "formula", note=chosen.source)
    peak = best.sized.peak_bytes
    report.add("training/peak memory of a rank", peak, "bytes", "formula")
    return report
