"""A priced server as a file, and the limits that `phalanx serve` takes from it.

`phalanx serve` runs one engine on one device, so the file is of such engines, one started for each
device, even where larger ones would serve more. It keeps no blocks of prompts for others, so its
price is without reuse, whatever the requests share.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from math import ceil
from typing import Any

from phalanx.cost.model_shape import shape_of
from phalanx.doctor.machine import num_cores
from phalanx.errors import JobError, PlanError
from phalanx.job import Job
from phalanx.models.config import DecoderConfig
from phalanx.plan import Plan, Pool, RoleProgram
from phalanx.planner.clusters import AskedCluster
from phalanx.planner.lock_place import device_of, hardware_of, require_place
from phalanx.planner.models import PricedModel
from phalanx.planner.serve_plan import Engines, ServeAnswer, ServeQuestion, serve_answer
from phalanx.report import Report

_ONE_DEVICE = {"tensor": 1, "pipeline": 1, "expert": 1, "attention_dp": 1}
_MODEL = ("model", "num_params")
_PEAK = 2.0  # requests at once over their mean number that the batch has room for


def serve_lockfile(
    job: Job, model: PricedModel, asked: AskedCluster, question: ServeQuestion
) -> tuple[Plan, ServeAnswer]:
    """The plan of a cluster as `phalanx serve` runs it, and its price.

    The batch has room for twice the requests that the asked load keeps running in the mean (at
    least those of `serve.max_running`), the cache for all of them or what memory holds.

    Raises:
        JobError: `job/bad-value` where engines of one device cannot serve it, for weights in
            numbers that `phalanx serve` does not multiply, and for models that it does not compute.
    """
    where = "--output"
    if model.config is None:
        raise JobError("job/bad-value", where, model.name, "`phalanx serve` does not compute it")
    if question.precision != "bf16":
        rule = "`phalanx serve` keeps weights in 16 or 32 bits"
        raise JobError("job/bad-value", "--precision", question.precision, rule, legal=["bf16"])
    question = replace(question, reuses_prefixes=False)
    answer = serve_answer(model.sizes, asked, question, only=_ONE_DEVICE)
    if answer.best is None or not answer.fits:
        why = "is too small" if answer.best is None else "is too slow"
        rule = f"`phalanx serve` runs engines of one device, which {why} for it"
        raise JobError("job/bad-value", where, asked.text, rule)
    cluster, best = asked.cluster, answer.best
    react = job.plan.serve
    role = RoleProgram(
        pool="all",
        mesh={"replicate": best.replicas},
        reacts=(
            {"family": "serve"} | ({"name": react} if isinstance(react, str) else dict(react)),
        ),
        batch=_limits(job, question, best)
        | {"threads": _threads(asked), "model": model.name, "num_params": model.sizes.num_params},
        dtypes={"params": "bfloat16"},
        device=device_of(cluster),
    )
    plan = Plan(
        job=job.name,
        job_key=job.result_key,
        hardware=hardware_of(cluster),
        pools={"all": Pool(machine=cluster.machine.name, devices=tuple(range(best.replicas)))},
        programs={"serve": role},
        predictions=[asdict(row) for row in _predicted(answer, best).rows],
    )
    return plan, answer


def serve_limits(plan: Plan, config: DecoderConfig) -> dict[str, Any]:
    """Settings of a server (fields of `ServeSettings`) as a plan has them.

    Args:
        config: of the model that will be served.

    Raises:
        PlanError: `plan/illegal` for a plan without a server, `plan/job` for another model; as
            `Plan.require_here`.
    """
    role = plan.program("serve")
    missing = [name for name in _MODEL if name not in role.batch]
    if missing:
        rule = "is the server of a run, which `phalanx run` starts itself; plan one with --serve -o"
        raise PlanError("plan/illegal", "plan", plan.job, rule)
    require_place(plan, int(plan.hardware["num_devices"]))
    found, made_for = shape_of(config).num_params, role.batch["num_params"]
    if found != made_for:
        rule = f"the plan was made for {role.batch['model']} with {made_for:,} parameters"
        raise PlanError("plan/job", "model folder", f"{found:,} parameters", rule)
    (react,) = role.reacts
    scheduler = {name: value for name, value in react.items() if name != "family"}
    limits = {name: value for name, value in role.batch.items() if name not in _MODEL}
    return limits | {"scheduler": scheduler, "device": role.device, "dtype": role.dtypes["params"]}


def _limits(job: Job, question: ServeQuestion, best: Engines) -> dict[str, Any]:
    mean = best.loaded * best.latency_s.value / best.replicas
    running = min(best.max_running, max(job.serve.max_running, ceil(_PEAK * mean)))
    longest = ceil(question.longest_tokens)
    return {
        "max_running": running,
        "max_tokens": longest,
        "max_step_tokens": max(job.serve.max_step_tokens, running),
        "kv_tokens": min(int(best.kv_tokens), running * longest),
    }


def _threads(asked: AskedCluster) -> int:
    """Of an engine where devices are shares of a CPU; 0: as torch decides."""
    cluster = asked.cluster
    is_cpu = device_of(cluster) == "cpu"
    return max(1, num_cores() // cluster.num_devices) if is_cpu else 0


def _predicted(answer: ServeAnswer, best: Engines) -> Report:
    report, note = Report("prediction"), "; ".join(answer.source)
    for name, bar in (("TTFT", best.ttft_s), ("TPOT", best.tpot_s), ("latency", best.latency_s)):
        report.add(f"load/{name} mean", bar.value, "s", "formula", note=note)
    report.add("load/requests per second, most", best.knee_per_s, "1/s", "formula", note=note)
    return report
