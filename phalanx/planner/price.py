"""A training job priced on clusters: what `phalanx plan` answers. No torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from threading import Timer
from typing import Any

from phalanx.errors import JobError
from phalanx.job import Job
from phalanx.models.config import DTYPE_BYTES
from phalanx.models.named import NamedModel, named_model
from phalanx.models.source import data_settings, model_source
from phalanx.models.spec import (
    PROJECTIONS,
    LoraSpec,
    canonical_tensors,
    lora_tensors,
    num_params,
    weight_bytes,
)
from phalanx.plan import Plan, Pool, RoleProgram
from phalanx.planner.candidates import RECOMPUTE, Choice, fixed_mesh
from phalanx.planner.clusters import AskedCluster, asked_clusters
from phalanx.planner.nearest import Nearest, nearest_that_fit
from phalanx.planner.profile import profile_of
from phalanx.planner.search import Answer, answer
from phalanx.planner.training import Training
from phalanx.report import Report

_MOMENT_BYTES = 8  # AdamW, float32, per trained element
_SIMULATED_ONLY = ("toy",)
_PATIENCE_S = 1.5


@dataclass(frozen=True, kw_only=True)
class PricedJob:
    """A job with what each cluster can do for it.

    Attributes:
        answers: one per cluster, as they were asked for.
        nearest: jobs that fit, where no cluster does.
        notes: what a reader has to know of how the job was read.
    """

    job: Job
    model: NamedModel
    training: Training
    answers: Sequence[Answer]
    nearest: Sequence[Nearest]
    notes: Sequence[str]

    @property
    def fits(self) -> bool:
        """Whether some cluster does it."""
        return any(each.fits for each in self.answers)

    @property
    def best(self) -> Answer | None:
        """The cluster that the job's objective prefers, of those that fit."""
        minimise = self.job.objective.minimise

        def rank(each: Answer) -> float:
            assert each.best is not None
            values = {"time": each.hours[0], "cost": each.dollars[0]}
            return values.get(minimise, each.best.sized.peak_bytes)

        return min((each for each in self.answers if each.fits), key=rank, default=None)

    @property
    def num_params(self) -> int:
        """Of the model, adapters not counted."""
        return num_params(self.training.config)

    @property
    def num_trained(self) -> int:
        """Elements that get a gradient."""
        lora = self.training.lora
        if lora is None:
            return self.num_params
        return sum(each.num_elements for each in lora_tensors(self.training.config, lora).values())

    @property
    def checkpoint_bytes(self) -> float:
        """Disk space of checkpoints at their most: trained weights and moments."""
        per_element = DTYPE_BYTES[self.training.master_dtype] + _MOMENT_BYTES
        return float(self.training.checkpoints * self.num_trained * per_element)

    @property
    def model_bytes(self) -> float:
        """The weights on disk, once to read and once more as the result."""
        return float(weight_bytes(self.training.config))

    def host_bytes(self, each: Answer) -> float:
        """Memory of a host while its ranks load: each holds one whole tensor at a time."""
        largest = max(t.num_bytes for t in canonical_tensors(self.training.config).values())
        cluster = each.asked.cluster
        return float(largest * min(cluster.num_devices, _devices_of_host(each.asked)))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "fits": self.fits,
            "model": {
                "name": self.model.name,
                "source": self.model.source,
                "params": self.num_params,
                "trained": self.num_trained,
            },
            "data": self.training.profile.to_dict(),
            "steps": self.training.num_steps,
            "batch_tokens": self.training.batch_tokens,
            "checkpoint_bytes": self.checkpoint_bytes,
            "model_bytes": self.model_bytes,
            "clusters": [
                each.to_dict() | {"host_bytes": self.host_bytes(each)} for each in self.answers
            ],
            "nearest": [
                {"change": each.change, "flags": each.flags} | each.answer.to_dict()
                for each in self.nearest
            ],
            "notes": list(self.notes),
        }


def _devices_of_host(asked: AskedCluster) -> int:
    """Devices that share a host: a scale-up domain, at most 8 of them."""
    return min(8, asked.cluster.machine.devices_per_domain)


def is_simulated(job: Job) -> bool:
    """Whether the job is one to play step by step rather than to search: a toy, or a schedule."""
    axes = set(job.plan.mesh) - {"replicate", "shard", "tp"}
    named = {"plan.pipeline", "plan.context", "plan.costs"} & set(job.origin)
    return job.model.name in _SIMULATED_ONLY or bool(axes or named or job.train.item_tokens)


def price_job(job: Job, on: str = "", *, whole_epoch: bool = False) -> PricedJob:
    """Price a job on every cluster that it names.

    Args:
        on: clusters separated by commas, instead of `plan.on`.
        whole_epoch: one pass over the data where the job says neither steps nor epochs.

    Raises:
        JobError: from the model, the data or the clusters; for limits that contradict each other.
    """
    clusters = asked_clusters(on or job.plan.on)
    for each in clusters:
        _require_devices(job, each)
    model = _model_of(job)
    training = _training(job, model, whole_epoch=whole_epoch)
    notes: list[str] = [each.note for each in clusters if each.note]
    options: dict[str, Any] = {
        "minimise": job.objective.minimise,
        "limit_bytes": job.limits.memory_bytes,
    }
    answers = []
    for asked in clusters:
        chosen, note = _with_mesh(training, job, asked)
        notes += [note] if note else []
        answers.append(answer(chosen, asked, limit_s=job.limits.time_s, **options))
    nearest: list[Nearest] = []
    if not any(each.fits for each in answers):
        nearest = nearest_that_fit(min(answers, key=_missing_frac), **options)
    return PricedJob(
        job=job, model=model, training=training, answers=answers, nearest=nearest, notes=notes
    )


def _missing_frac(each: Answer) -> float:
    """How far it is from fitting, of what it has."""
    return each.smallest.peak_bytes / each.limit_bytes if each.smallest else float("inf")


def _require_devices(job: Job, asked: AskedCluster) -> None:
    number = asked.cluster.num_devices
    if job.plan.devices not in (0, number):
        rule = f"contradicts the cluster {asked.text}, which has {number}"
        raise JobError("job/bad-value", "plan.devices", job.plan.devices, rule, legal=[0, number])


def _model_of(job: Job) -> NamedModel:
    name = job.model.name

    def log(text: str) -> None:
        print(text, file=sys.stderr)

    if name == "tiny" or name.endswith(".gguf"):
        source = model_source(job, log, weights=False)
        return NamedModel(name, source.config, "the job", source.tokenizer_folder)
    return named_model(name, log)


def _training(job: Job, model: NamedModel, *, whole_epoch: bool) -> Training:
    config = model.config.with_dtype(job.model.dtype)
    with _said_if_slow(f"counting the tokens of {job.data.source}; the next time they are known"):
        profile = profile_of(model, data_settings(job, config))
    lora = None
    if job.train.method == "lora":
        targets = tuple(job.train.lora_targets) or PROJECTIONS
        lora = LoraSpec(rank=job.train.lora_rank, alpha=job.train.lora_alpha, targets=targets)
    if 0 < job.plan.row_tokens < profile.longest:
        rule = f"a document has {profile.longest} tokens and is never cut between rows"
        where = "plan.row_tokens"
        raise JobError("job/bad-value", where, job.plan.row_tokens, rule, legal=[profile.longest])
    is_open = not {"train.steps", "train.epochs"} & set(job.origin)
    return Training(
        config=config,
        profile=profile,
        method=job.train.method,
        lora=lora,
        batch_tokens=job.train.global_batch_tokens,
        epochs=1.0 if whole_epoch and is_open else job.train.epochs,
        steps=job.train.steps,
        master_dtype=job.train.master_dtype,
        checkpoints=job.plan.keep_checkpoints + 1 if job.plan.checkpoint_every else 1,
        seed=job.train.seed,
        choice=Choice(
            recompute=(job.plan.recompute,) if "plan.recompute" in job.origin else RECOMPUTE,
            row_tokens=job.plan.row_tokens,
        ),
    )


@contextmanager
def _said_if_slow(text: str) -> Iterator[None]:
    """A line on stderr for what takes longer than a person waits without asking."""
    timer = Timer(_PATIENCE_S, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _with_mesh(training: Training, job: Job, asked: AskedCluster) -> tuple[Training, str]:
    """The training with the job's mesh where it fits the cluster, and what to say about it."""
    if not job.plan.mesh:
        return training, ""
    shape = ", ".join(f"{axis} {size}" for axis, size in job.plan.mesh.items())
    mesh = fixed_mesh(job.plan.mesh, asked.cluster.num_devices)
    if mesh is None:
        return training, f"plan.mesh ({shape}) is not for {asked.text}: its meshes were searched"
    kept = replace(training, choice=replace(training.choice, mesh=mesh))
    return kept, f"{asked.text}: the job's mesh ({shape}) was kept"


def lockfile(priced: PricedJob, chosen: Answer) -> Plan:
    """The plan of one cluster."""
    assert chosen.best is not None
    cluster, best = chosen.asked.cluster, chosen.best
    report = Report("prediction")
    expected_s = 3600 * chosen.hours[0]
    note = chosen.efficiency.describe()
    steps = priced.training.num_steps
    report.add("training/step time", expected_s / steps, "s", "formula", note=note)
    report.add("training/all steps", expected_s, "s", "formula", note=note)
    peak = best.sized.peak_bytes
    report.add("training/peak memory of a rank", peak, "bytes", "formula")
    layout = best.candidate.layout
    role = RoleProgram(
        pool="all",
        mesh=layout.mesh.to_dict(),
        specs=layout.tables(),
        batch={"row_tokens": best.candidate.row_tokens},
        dtypes={
            "compute": priced.job.model.dtype,
            "master": priced.job.train.master_dtype,
            "reduce": "float32",
        },
        recompute=best.candidate.recompute,
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
        predictions=[asdict(row) for row in report.rows],
    )
