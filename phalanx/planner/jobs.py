"""From the words of a command line to a simulated plan: what `plan` and `simulate` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import JobError
from phalanx.hardware import machine_names
from phalanx.job import Job, load_job, parse_flags
from phalanx.models.config import DecoderConfig
from phalanx.models.named import preset_names
from phalanx.plan import Plan
from phalanx.planner.lockfile import laid_out
from phalanx.planner.make import Planned, make_plan
from phalanx.planner.models import priced_model
from phalanx.planner.simulate import Simulated, simulate

_ROWS = {"train.item_tokens", "train.global_batch_tokens", "plan.row_tokens"}
_EXAMPLES = ("a100-80g", "b200", "h100", "mi300x", "v5p")


def plan_job(
    path: str,
    arguments: Sequence[str],
    on: str = "",
    lockfile: str = "",
    rates: str = "fitted",
) -> tuple[Job, Planned, Simulated]:
    """Load, plan and simulate.

    Args:
        path: job file, or a model.
        arguments: dotted flags.
        on: cluster shorthand, instead of the job's.
        lockfile: a plan of the training role, whose layout and devices are those of the step; so
            are its micro-batches, unless the flags say how many tokens a step or a row has.
        rates: as `make_plan`.

    Raises:
        JobError, PlanError, CheckError: from any of the steps.
    """
    plan = Plan.load(lockfile) if lockfile else None
    if plan is None:
        job = read_job(path, arguments)
        return job, *simulate_job(job, on, rates=rates)
    rows = plan.program("train").batch.get("priced", {})
    layout = laid_out(plan) | _items_of(rows, parse_flags(arguments))
    job = read_job(path, arguments, layout)
    return job, *simulate_job(job, on or _devices_of(plan), rates=rates, rows=rows)


def _items_of(rows: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """The micro-batches that were priced, whole ones, unless the flags name others."""
    if not rows or _ROWS & set(flags):
        return {}
    tokens = max(1, round(rows["micro_rows"] * rows["row_tokens"]))
    return {"train.item_tokens": [tokens] * max(1, round(rows["num_micro"]))}


def _devices_of(plan: Plan) -> str:
    """The cluster that a plan was made for, in shorthand."""
    pool = plan.pools[plan.program("train").pool]
    return f"{len(pool.devices)}x{pool.machine}"


def read_job(target: str, arguments: Sequence[str], layout: Mapping[str, Any] | None = None) -> Job:
    """The job of a file (TOML), or one of flags alone for a model.

    Args:
        layout: keys of `[plan]`, unless the flags say otherwise.

    Raises:
        JobError: from `load_job`.
    """
    flags: dict[str, Any] = {**(layout or {}), **parse_flags(arguments)}
    if target.endswith(".toml") or Path(target).is_file():
        return load_job(target, flags)
    return load_job(None, {"model.name": target} | flags)


def simulate_job(
    job: Job, on: str = "", *, rates: str = "fitted", rows: Mapping[str, Any] | None = None
) -> tuple[Planned, Simulated]:
    """Plan a job as it is written, and play one step of it.

    Args:
        rates, rows: as `make_plan`.

    Raises:
        JobError, PlanError, CheckError: from any of the steps.
    """
    cluster = on or job.plan.on
    if cluster == "here":
        rule = "name a cluster; `phalanx run` plans for this machine and measures it first"
        legal = [f"8x{name}" for name in machine_names() if name in _EXAMPLES]
        raise JobError("job/bad-value", "plan.on", "here", rule, legal=legal)
    planned = make_plan(job, config_of(job), cluster, rates=rates, rows=rows)
    return planned, simulate(planned, job.limits.memory_bytes)


def config_of(job: Job) -> DecoderConfig | None:
    """Sizes of the job's model; None for 'toy'. Weights are not asked for.

    Raises:
        JobError: `model/unknown` for a model of which the shape is known but not the operators.
    """
    if job.model.name == "toy":
        return None
    model = priced_model(job)
    if model.config is None:
        rule = "its sizes are known, but not its operators: `phalanx plan` prices it"
        raise JobError("model/unknown", "model.name", model.name, rule, legal=preset_names())
    model.config.require_computable()
    return model.config.with_dtype(job.model.dtype)
