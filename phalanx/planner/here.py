"""A plan for this machine: its processes, and what a run will take, from measured rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from phalanx.cost.training import Workload, predict
from phalanx.doctor.machine import num_cores, processor_name
from phalanx.errors import PlanError
from phalanx.job import Job
from phalanx.mesh import Mesh
from phalanx.models.config import DecoderConfig
from phalanx.models.spec import weight_bytes
from phalanx.plan import Plan, Pool, RoleProgram, Transition
from phalanx.planner.make import mesh_of, policy_tables
from phalanx.registry import build
from phalanx.report import Report

_DATA_AXES = ("replicate", "shard")


def num_ranks_here(job: Job) -> int:
    """Processes of the training role: as the job's mesh or devices say, else one per core."""
    mesh = Mesh(dict(job.plan.mesh))
    return job.plan.devices or (mesh.size if job.plan.mesh else num_cores())


def hardware_here(num_ranks: int) -> dict[str, Any]:
    """What a plan remembers of this machine."""
    return {"machine": processor_name(), "num_devices": num_ranks, "cores": num_cores()}


def plan_here(
    job: Job,
    config: DecoderConfig,
    work: Workload,
    calibration: Mapping[str, Any],
    num_ranks: int,
) -> Plan:
    """The plan of a training run on local processes and of serving its result.

    Args:
        job: what is asked.
        config: sizes of the model, in the job's dtype.
        work: from `engines.calibrate.workload`.
        calibration: from `engines.calibrate.calibrate`.
        num_ranks: from `num_ranks_here`.

    Raises:
        PlanError: `plan/illegal` for a mesh that `phalanx train` cannot run yet.
    """
    mesh = mesh_of(job, num_ranks)
    for axis in mesh.names:
        if axis not in _DATA_AXES and mesh.degree(axis) > 1:
            rule = "training runs on data axes only so far; other axes are simulated and proven"
            raise PlanError("plan/illegal", f"plan.mesh.{axis}", mesh.degree(axis), rule, legal=[1])
    _, tables = policy_tables(job, mesh)
    data = [table for table in tables if table["family"] == "data"]
    specs = [build("data", {k: v for k, v in t.items() if k != "family"}) for t in data]
    rates = calibration["rates"]
    prediction = predict(config, work, specs, rates, num_ranks=mesh.size)
    report = Report("prediction")
    note = "from rates measured on this machine before step 1"
    step_s, peak = prediction.step_s, prediction.peak_bytes
    report.add("training/step time", step_s, "s", "formula", note=note)
    report.add("training/peak memory", peak, "bytes", "formula", note=_largest(prediction.terms))
    train_s = step_s * job.train.steps
    report.add("training/all steps", train_s, "s", "formula", note=note)
    train = RoleProgram(
        pool="here",
        mesh=mesh.to_dict(),
        specs=data,
        batch={"row_tokens": job.data.max_tokens},
        dtypes={"compute": job.model.dtype, "master": "float32", "reduce": "float32"},
        device="cpu",
    )
    react = job.plan.serve
    serve = RoleProgram(
        pool="here",
        mesh={"replicate": 1},
        reacts=(
            {"family": "serve"} | ({"name": react} if isinstance(react, str) else dict(react)),
        ),
        batch={"max_running": job.serve.max_running, "max_tokens": job.serve.max_tokens},
        dtypes={"params": job.model.dtype},
        device="cpu",
    )
    exported = Transition(
        source="train",
        target="serve",
        tensors="all weights, adapters merged",
        trigger="end of training",
        payload_bytes=float(weight_bytes(config)),
    )
    hardware = hardware_here(mesh.size)
    return Plan(
        job=job.name,
        job_key=job.result_key,
        hardware=hardware | {"rates": {key: entry["value"] for key, entry in rates.items()}},
        pools={"here": Pool(machine=hardware["machine"], devices=tuple(range(mesh.size)))},
        programs={"train": train, "serve": serve},
        transitions=(exported,),
        predictions=[asdict(row) for row in report.rows],
    )


def _largest(terms: Mapping[str, float]) -> str:
    """The three terms of a rank that matter most."""
    first = sorted(terms.items(), key=lambda term: -term[1])[:3]
    return "per process: " + ", ".join(f"{name} {value / 2**20:.0f} MiB" for name, value in first)
