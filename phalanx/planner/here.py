"""A plan for this machine: its processes, and what a run will take, from measured rates."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import lcm, prod
from typing import Any

from phalanx.cost.local_shapes import local_config
from phalanx.cost.step_memory import memory_terms, units_of
from phalanx.cost.training import Prediction, Workload, predict, row_multiple, row_tokens_for
from phalanx.doctor.machine import gpus, memory_bytes, num_cores, processor_name
from phalanx.errors import JobError, PlanError
from phalanx.job import Job
from phalanx.layout.tensor_split import tensor_legality
from phalanx.mesh import Mesh
from phalanx.models.config import DTYPE_BYTES, DecoderConfig
from phalanx.models.spec import weight_bytes
from phalanx.plan import Plan, Pool, RoleProgram, Transition
from phalanx.planner.make import mesh_of, policy_tables
from phalanx.policy import Spec
from phalanx.registry import build
from phalanx.report import Report

_DATA_AXES = ("replicate", "shard")
_MEBIBYTES = re.compile(r"(\d+) MiB")
_TRAINED_FAMILIES = ("data", "tensor")


@cache
def gpus_here() -> tuple[str, ...]:
    """Names of the NVIDIA GPUs that processes of this one may use (CUDA_VISIBLE_DEVICES)."""
    found = [line for line in gpus() if "AMD" not in line]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(found)
    chosen = [each for each in visible.split(",") if each.strip() not in ("", "-1", "NoDevFiles")]
    return tuple(found[: len(chosen)])


def device_here() -> str:
    """What training runs on: "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if gpus_here() else "cpu"


def num_ranks_here(job: Job) -> int:
    """Processes of the training role: as the job's mesh or devices say, else one per GPU, or per
    core where there is none."""
    mesh = Mesh(dict(job.plan.mesh))
    return job.plan.devices or (mesh.size if job.plan.mesh else len(gpus_here()) or num_cores())


def hardware_here(num_ranks: int) -> dict[str, Any]:
    """What a plan remembers of this machine."""
    machine = gpus_here()[0] if gpus_here() else processor_name()
    return {"machine": machine, "num_devices": num_ranks, "cores": num_cores()}


@dataclass(frozen=True)
class TrainingShape:
    """Mesh and policies of the training role.

    Attributes:
        tables: the specs as tables with family, name and options.
        specs: the same, built.
    """

    mesh: Mesh
    tables: Sequence[Mapping[str, Any]]
    specs: Sequence[Spec]

    @property
    def num_data_ranks(self) -> int:
        """Ranks that compute different rows."""
        return prod(self.mesh.degree(axis) for axis in _DATA_AXES)

    @property
    def tensor_degree(self) -> int:
        """Ranks that share every product."""
        return self.mesh.size // self.num_data_ranks

    @property
    def splits_tokens(self) -> bool:
        """Whether those also share the tokens between blocks (sequence parallelism)."""
        exchanges = (
            exchange
            for spec in self.specs
            if spec.family == "tensor"
            for rule in spec.rules()
            if rule.placement == "block"
            for exchange in rule.exchanges
        )
        return any(each.collective == "reduce_scatter" for each in exchanges)


def with_layout(job: Job, config: DecoderConfig, num_ranks: int) -> Job:
    """The job with a mesh and a data policy, where it names neither and no tensor policy.

    Adapters on a frozen base: whole copies, if a copy takes at most half of a rank's memory (then
    only adapters travel). Otherwise FSDP, which keeps gathered weights through a step if they take
    at most a quarter.
    """
    if {"plan.mesh", "plan.data", "plan.tensor"} & _named(job):
        return job
    whole, room = weight_bytes(config), memory_of_rank(num_ranks)
    if job.train.method == "lora" and whole <= room / 2:
        plan = replace(job.plan, mesh={"replicate": num_ranks}, data="replicate")
    else:
        fsdp = {"name": "fsdp", "reshard_after_forward": whole > room / 4}
        plan = replace(job.plan, mesh={"shard": num_ranks}, data=fsdp)
    origin = dict(job.origin) | dict.fromkeys(("plan.mesh", "plan.data"), "chosen here")
    return replace(job, plan=plan, origin=origin)


def _named(job: Job) -> set[str]:
    """Keys of [plan] that the user gave, without what stands inside of them."""
    return {".".join(key.split(".")[:2]) for key in job.origin}


def memory_of_rank(num_ranks: int) -> float:
    """Bytes of a GPU, or of this machine over its ranks."""
    sizes = [float(found[1]) for gpu in gpus_here() if (found := _MEBIBYTES.search(gpu))]
    return min(sizes) * 2**20 if sizes else memory_bytes()[0] / num_ranks


def training_shape(job: Job, config: DecoderConfig, num_ranks: int) -> TrainingShape:
    """How the training role lies on `num_ranks` processes.

    Raises:
        JobError: `mesh/product`.
        PlanError: `plan/illegal` for an axis that training cannot use or no policy uses, or a
            tensor degree that the model cannot be cut by.
    """
    job = with_layout(job, config, num_ranks)
    mesh = mesh_of(job, num_ranks)
    _, tables = policy_tables(job, mesh)
    tables = [table for table in tables if table["family"] in _TRAINED_FAMILIES]
    specs: list[Spec] = [
        build(str(table["family"]), {k: v for k, v in table.items() if k != "family"})
        for table in tables
    ]
    tensor_axes = {spec.axis for spec in specs if spec.family == "tensor"}
    for axis in mesh.names:
        degree, where = mesh.degree(axis), f"plan.mesh.{axis}"
        if degree == 1 or axis in _DATA_AXES:
            continue
        if axis not in tensor_axes:
            rule = (
                "training uses data axes, and a tensor axis with plan.tensor; others are simulated"
            )
            raise PlanError("plan/illegal", where, degree, rule, legal=[1])
        tensor_legality(config, degree).require(where)
    for spec in specs:
        if spec.axis not in mesh.names:
            where, rule = f"plan.{spec.family}", f"needs an axis {spec.axis!r} in plan.mesh"
            raise PlanError("plan/illegal", where, spec.policy_name, rule, legal=mesh.names)
    if all(mesh.degree(axis) == 1 for axis in _DATA_AXES) and not _casts_weights(job):
        # one rank has nothing to gather, and gathering would keep a second copy of every weight
        tables = [table for table in tables if table["family"] != "data"]
        specs = [spec for spec in specs if spec.family != "data"]
    return TrainingShape(mesh, tables, specs)


def _casts_weights(job: Job) -> bool:
    """Whether data policies also turn what is trained into the dtype that computes."""
    return job.train.method != "lora" and job.train.master_dtype != job.model.dtype


def row_plan(job: Job, longest: int, shape: TrainingShape, device: str) -> dict[str, int]:
    """Tokens of a packed row, and what rows are filled up to a multiple of.

    Args:
        longest: tokens of the longest document.

    Raises:
        JobError: `job/bad-value` for `plan.row_tokens` below the longest document.
    """
    multiple = lcm(row_multiple(device), shape.tensor_degree if shape.splits_tokens else 1)
    chosen = job.plan.row_tokens
    if chosen and chosen < longest:
        rule = f"a document has {longest} tokens and is never cut between rows"
        raise JobError("job/bad-value", "plan.row_tokens", chosen, rule, legal=[longest])
    return {"row_tokens": chosen or row_tokens_for(longest, multiple), "row_multiple": multiple}


def tensor_bytes(job: Job, config: DecoderConfig, work: Workload, shape: TrainingShape) -> float:
    """Bytes of the tensors of one rank at the peak of a step; what libraries hold is not in it."""
    local = local_config(config, work.tensor_degree)
    data = [spec for spec in shape.specs if spec.family == "data"]
    units = units_of(local, work, data, shape.mesh, DTYPE_BYTES[job.train.master_dtype])
    return sum(memory_terms(local, work, units, recompute=job.plan.recompute).values())


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
    prediction = predict(
        config,
        work,
        shape.specs,
        rates,
        mesh=shape.mesh,
        master_bytes=DTYPE_BYTES[master],
        recompute=job.plan.recompute,
    )
    _require_memory(job, prediction)
    report = Report("prediction")
    note = "from rates measured on this machine before step 1"
    step_s, peak = prediction.step_s, prediction.peak_bytes
    report.add("training/step time", step_s, "s", "formula", note=note)
    report.add("training/peak memory", peak, "bytes", "formula", note=_largest(prediction.terms))
    report.add("training/all steps", step_s * work.num_steps, "s", "formula", note=note)
    train = RoleProgram(
        pool="here",
        mesh=shape.mesh.to_dict(),
        specs=shape.tables,
        batch={"row_tokens": work.row_limit, "row_multiple": work.row_multiple},
        dtypes={"compute": job.model.dtype, "master": master, "reduce": "float32"},
        recompute=job.plan.recompute,
        device=device_here(),
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
    hardware = hardware_here(shape.mesh.size)
    return Plan(
        job=job.name,
        job_key=job.result_key,
        hardware=hardware | {"rates": {key: entry["value"] for key, entry in rates.items()}},
        pools={"here": Pool(machine=hardware["machine"], devices=tuple(range(shape.mesh.size)))},
        programs={"train": train, "serve": serve},
        transitions=(exported,),
        predictions=[asdict(row) for row in report.rows],
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
