"""A priced job as files: the lockfile that `phalanx train` is given, or those of other programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain, islice
from typing import Any

from phalanx.cost.training_plans import TrainingPlans
from phalanx.errors import JobError, PlanError
from phalanx.plan import Plan, Pool, RoleProgram
from phalanx.planner.answers import Answer, PricedPlan
from phalanx.planner.emitters import Site, emit, plan_of
from phalanx.planner.priced_job import PricedJob
from phalanx.report import Report

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
    role = RoleProgram(
        pool="all",
        mesh=layout.mesh.to_dict(),
        specs=layout.tables(),
        batch={"row_tokens": best.sized.row_limit},
        dtypes={
            "compute": priced.job.model.dtype,
            "master": priced.job.train.master_dtype,
            "reduce": "float32",
        },
        recompute=best.sized.recompute,
        device="tpu" if cluster.machine.cores_per_device else "cuda",
    )
    return Plan(
        job=priced.job.name,
        job_key=priced.job.result_key,
        hardware=cluster.to_dict(),
        pools={
            "all": Pool(machine=cluster.machine.name, devices=tuple(range(cluster.num_devices)))
        },
        programs={"train": role},
        predictions=[asdict(row) for row in _predicted(priced, chosen, best).rows],
    )


def foreign_files(
    priced: PricedJob, chosen: Answer, target: str
) -> tuple[PricedPlan, Mapping[str, str]]:
    """The best plan of a cluster that another program has words for, and its files: name -> text.

    Raises:
        JobError: `registry/unknown` for a target that is not known.
        PlanError: `emit/impossible` where it has words for none: what it says of the best.
    """
    assert chosen.best is not None
    refused: PlanError | None = None
    seen: set[tuple[float, ...]] = set()
    for plan in islice(chain([chosen.best], chosen.ranked), _MOST_TRIED):
        kind = tuple(plan.sized.row[name] for name in _WORDED)
        if kind in seen:
            continue
        seen.add(kind)
        try:
            return plan, _emitted(priced, chosen, plan, target)
        except PlanError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _emitted(priced: PricedJob, chosen: Answer, plan: PricedPlan, target: str) -> Mapping[str, str]:
    training, cluster = priced.training, chosen.asked.cluster
    row: dict[str, Any] = dict(plan.sized.row)
    if training.profile is not None:
        row["row_tokens"] = plan.sized.row_limit
        row["num_micro"] = max(1, round(row["num_micro"]))
    plans = TrainingPlans(
        **row,
        method=training.method,
        lora_rank=training.lora.rank if training.lora else 0,
        base_bits=training.base_bits,
        precision=training.precision,
    )
    per_node = min(cluster.num_devices, cluster.machine.devices_per_domain, 8)
    site = Site(accelerator=cluster.machine.name.upper(), devices_per_node=per_node)
    return emit(target, plan_of(priced.job, plans, 0, training.shape), site)


def _predicted(priced: PricedJob, chosen: Answer, best: PricedPlan) -> Report:
    report = Report("prediction")
    step_s, steps = best.total_s, priced.training.num_steps
    report.add("training/step time", step_s, "s", "formula", note=chosen.source)
    report.add("training/all steps", step_s * steps, "s", "formula", note=chosen.source)
    peak = best.sized.peak_bytes
    report.add("training/peak memory of a rank", peak, "bytes", "formula")
    return report
