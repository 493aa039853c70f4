"""A plan for this machine: its processes, and what a run will take, from measured rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from phalanx.cost.local_shapes import local_config
from phalanx.cost.pipeline_memory import terms_of_ranks, units_of_ranks
from phalanx.cost.training import Pipeline, Prediction, Workload, predict
from phalanx.errors import PlanError
from phalanx.job import Job
from phalanx.layout.stage_split import split_layers
from phalanx.models.config import DTYPE_BYTES, DecoderConfig
from phalanx.models.spec import weight_bytes
from phalanx.plan import Plan, Pool, RoleProgram, Transition
from phalanx.planner.machine_here import (
    device_here,
    gpus_here,
    hardware_here,
    memory_of_rank,
    num_ranks_here,
)
from phalanx.planner.training_shape import TrainingShape, row_plan, training_shape, with_layout
from phalanx.report import Report

__all__ = [
    "TrainingShape",
    "device_here",
    "gpus_here",
    "hardware_here",
    "memory_of_rank",
    "num_ranks_here",
    "plan_here",
    "row_plan",
    "tensor_bytes",
    "training_shape",
    "with_layout",
]


def tensor_bytes(job: Job, config: DecoderConfig, work: Workload, shape: TrainingShape) -> float:
    """Bytes of the tensors of the fullest rank at the peak of a step; what libraries hold is not in
    it."""
    local = local_config(config, work.tensor_degree)
    data = [spec for spec in shape.specs if spec.family == "data"]
    pipeline = _pipeline(job, config, work, shape)
    master_bytes = DTYPE_BYTES[job.train.master_dtype]
    units = units_of_ranks(local, work, data, shape.mesh, master_bytes, pipeline)
    terms = terms_of_ranks(
        local, work, units, pipeline, recompute=job.plan.recompute, offloads=_offloads(job)
    )
    return max(sum(each.values()) for each in terms)


def _offloads(job: Job) -> bool:
    """Whether moments leave the memory that counts: on CPUs the host's own does not."""
    away = ("file",) if device_here() == "cpu" else ("file", "host")
    return job.plan.offload in away


def _pipeline(job: Job, config: DecoderConfig, work: Workload, shape: TrainingShape) -> Pipeline:
    """Stages as the job names them, or that take about the same time with the tokens that count."""
    if shape.order is None:
        return Pipeline.whole(config)
    stages = shape.stages
    if not job.plan.stages:
        stages = split_layers(
            config,
            len(stages),
            document_tokens=work.document_tokens,
            counted_frac=work.counted / work.tokens,
            lora=work.lora,
        )
    ranges = [(stage.start, stage.stop) for stage in stages]
    return Pipeline.of(config, shape.order, shape.pipeline_degree, ranges)


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
        PlanError: as `training_shape`; `plan/memory` when `limits.memory_bytes` is too little.
    """
    shape = training_shape(job, config, num_ranks)
    master = job.train.master_dtype
    rates = calibration["rates"]
    pipeline = _pipeline(job, config, work, shape)
    prediction = predict(
        config,
        work,
        shape.specs,
        rates,
        mesh=shape.mesh,
        master_bytes=DTYPE_BYTES[master],
        recompute=job.plan.recompute,
        pipeline=pipeline,
        offloads=_offloads(job),
    )
    _require_memory(job, prediction)
    report = Report("prediction")
    note = "from rates measured on this machine before step 1"
    step_s, peak = prediction.step_s, prediction.peak_bytes
    report.add("training/step time", step_s, "s", "formula", note=note)
    report.add("training/peak memory", peak, "bytes", "formula", note=_largest(prediction.terms))
    report.add("training/all steps", step_s * work.num_steps, "s", "formula", note=note)
    batch: dict[str, Any] = {"row_tokens": work.row_limit, "row_multiple": work.row_multiple}
    if shape.order is not None:
        batch["stages"] = [list(stage) for stage in pipeline.stages]
    train = RoleProgram(
        pool="here",
        mesh=shape.mesh.to_dict(),
        specs=shape.tables,
        order=shape.order_table,
        batch=batch,
        dtypes={"compute": job.model.dtype, "master": master, "reduce": "float32"},
        recompute=job.plan.recompute,
        device=device_here(),
    )
    exported = Transition(
        source="train",
        target="serve",
        tensors="all weights, adapters merged",
        trigger="end of training",
        payload_bytes=float(weight_bytes(config)),
    )
    hardware = hardware_here(shape.mesh.size)
    return Plan(
        job=job.name,
        job_key=job.result_key,
        asked=job.result_table,
        hardware=hardware | {"rates": {key: entry["value"] for key, entry in rates.items()}},
        pools={"here": Pool(machine=hardware["machine"], devices=tuple(range(shape.mesh.size)))},
        programs={"train": train, "serve": _serving_role(job)},
        transitions=(exported,),
        predictions=[asdict(row) for row in report.rows],
    )


def _serving_role(job: Job) -> RoleProgram:
    """Of the result, on one process."""
    react = job.plan.serve
    options = {"name": react} if isinstance(react, str) else dict(react)
    return RoleProgram(
        pool="here",
        mesh={"replicate": 1},
        reacts=({"family": "serve"} | options,),
        batch={"max_running": job.serve.max_running, "max_tokens": job.serve.max_tokens},
        dtypes={"params": job.model.dtype},
        device="cpu",
    )


def _require_memory(job: Job, prediction: Prediction) -> None:
    limit, needed = job.limits.memory_bytes, sum(prediction.terms.values())
    if 0.0 < limit < needed:
        rule = f"a process needs {needed / 2**30:.2f} GiB ({_largest(prediction.terms)})"
        raise PlanError("plan/memory", "limits.memory_bytes", limit, rule, legal=[round(needed)])


def _largest(terms: Mapping[str, float]) -> str:
    """The three terms of a rank that matter most."""
    first = sorted(terms.items(), key=lambda term: -term[1])[:3]
    return "per process: " + ", ".join(f"{name} {value / 2**20:.0f} MiB" for name, value in first)
