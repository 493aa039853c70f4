"""A training job priced on clusters: what `phalanx plan` answers. No torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import ceil, prod
from threading import Timer
from typing import Any

from phalanx.cost.memory_software import memory_software_names
from phalanx.cost.training_plans import RECOMPUTE
from phalanx.errors import JobError, nearest_numbers
from phalanx.job import Job
from phalanx.models.source import data_settings
from phalanx.planner.adapters import Adapters, adapters_of
from phalanx.planner.answers import Answer
from phalanx.planner.clusters import AskedCluster, asked_clusters
from phalanx.planner.corrected import corrected, measured_runs
from phalanx.planner.given import given_plan
from phalanx.planner.largest import largest_of
from phalanx.planner.models import PricedModel, priced_model
from phalanx.planner.narrow import has_units, in_fp8
from phalanx.planner.nearest import Nearest, nearest_that_fit
from phalanx.planner.parts import PartsAnswer, by_parts
from phalanx.planner.priced_job import PricedJob
from phalanx.planner.profile import DataProfile, profile_of
from phalanx.planner.question import Question
from phalanx.planner.search import answer
from phalanx.planner.sizes import Size, smallest_size
from phalanx.planner.training import Choice, Training, fixed_mesh

_SIMULATED_ONLY = ("toy",)
_PATIENCE_S = 1.5


def is_simulated(job: Job) -> bool:
    """Whether the job is one to play step by step rather than to search: a toy, or a schedule."""
    axes = set(job.plan.mesh) - {"replicate", "shard", "pp", "cp", "tp"}
    named = {"plan.pipeline", "plan.context", "plan.costs"} & set(job.origin)
    return job.model.name in _SIMULATED_ONLY or bool(axes or named or job.train.item_tokens)


def price_job(job: Job, question: Question | None = None) -> PricedJob:
    """Price a job on every cluster that it names.

    Args:
        question: what is asked beside the job's own keys.

    Raises:
        JobError: from the model, the data or the clusters; for limits that contradict each other.
    """
    asks = question or Question()
    clusters = asked_clusters(asks.on or job.plan.on)
    for each in clusters:
        _require_devices(job, each)
    _require_mesh(job, clusters)
    model = priced_model(job)
    adapters = None
    if job.train.method == "lora":
        adapters = adapters_of(job, model, asks.base_bits, asks.foreign)
    training, of_one_step = _training(job, model, asks, adapters)
    _require_read(training, model.name, asks)
    _require_length(job, asks, of_one_step=of_one_step)
    notes: list[str] = [each.note for each in clusters if each.note]
    notes += adapters.notes if adapters else ()
    notes += [
        f"{each.text} has no units for {asks.precision}: products are priced in bf16"
        for each in clusters
        if not has_units(each.cluster.machine, asks.precision)
    ]
    options: dict[str, Any] = {
        "minimise": job.objective.minimise,
        "limit_bytes": job.limits.memory_bytes,
        "limit_s": job.limits.time_s,
        "budget_usd": asks.budget_usd,
    }
    answers: Sequence[Answer] = []
    for asked in clusters:
        chosen, note = _with_mesh(training, job, asked)
        notes += [note] if note else []
        answers = [*answers, answer(chosen, asked, **options)]
    if asks.measured:
        runs = measured_runs(asks.measured)
        answers, told = zip(*(corrected(each, runs) for each in answers), strict=True)
        notes += told
    nearest: list[Nearest] = []
    if not any(each.fits for each in answers):
        closest = min(answers, key=_missing_frac)
        limit = job.limits.memory_bytes
        nearest = nearest_that_fit(closest, minimise=job.objective.minimise, limit_bytes=limit)
    return PricedJob(
        job=job,
        model=model,
        training=training,
        answers=answers,
        parts=[_by_parts(each, job) for each in answers],
        narrow=[in_fp8(each) for each in answers],
        nearest=nearest,
        sizes=_sizes(answers, options) if asks.sizes else [],
        largest=[
            largest_of(asks.largest, each, model.most_tokens)
            for each in (answers if asks.largest else ())
        ],
        given=[given_plan(asks.foreign, each) for each in answers] if asks.foreign else [],
        of_one_step=of_one_step,
        notes=notes,
    )


def _sizes(answers: Sequence[Answer], options: dict[str, Any]) -> list[Size]:
    """Of each kind of machine once."""
    kinds = {each.asked.cluster.machine: each for each in reversed(answers)}
    return [smallest_size(each, **options) for each in reversed(kinds.values())]


def _by_parts(each: Answer, job: Job) -> PartsAnswer | None:
    if each.asked.mixed is None:
        return None
    limit, minimise = job.limits.memory_bytes, job.objective.minimise
    return by_parts(each.training, each.asked, limit_bytes=limit, minimise=minimise)


def _missing_frac(each: Answer) -> float:
    """How far it is from fitting, of what it has."""
    return each.smallest.peak_bytes / each.limit_bytes if each.smallest else float("inf")


def _require_devices(job: Job, asked: AskedCluster) -> None:
    number = asked.cluster.num_devices
    if job.plan.devices not in (0, number):
        rule = f"contradicts the cluster {asked.text}, which has {number}"
        raise JobError("job/bad-value", "plan.devices", job.plan.devices, rule, legal=[0, number])


def _require_mesh(job: Job, clusters: Sequence[AskedCluster]) -> None:
    """A mesh that was typed is of one of the clusters; that of a file may be of another place."""
    is_typed = any(job.origin[key] == "flag" for key in job.origin if key.startswith("plan.mesh"))
    numbers = [each.cluster.num_devices for each in clusters]
    if is_typed and not any(fixed_mesh(job.plan.mesh, number) for number in numbers):
        shape = ", ".join(f"{axis} {size}" for axis, size in job.plan.mesh.items())
        rule = f"multiplies to {prod(job.plan.mesh.values())} devices; name every axis"
        raise JobError("mesh/product", "plan.mesh", shape, rule, legal=sorted(set(numbers)))


def _require_length(job: Job, asks: Question, *, of_one_step: bool) -> None:
    """A deadline and a budget are of a whole job."""
    if of_one_step and (job.limits.time_s or asks.budget_usd):
        rule = "a deadline or a budget needs the length of the job: --tokens 15T or --train.steps"
        raise JobError("job/missing", "--tokens", None, rule)


def _require_read(training: Training, model: str, asks: Question) -> None:
    """Refuse what is asked of a part that the job has not."""
    if asks.base_bits not in (0, 16) and training.method != "lora":
        rule = f"is of frozen weights, and {training.method} trains all of them; add --lora 16"
        raise JobError("job/bad-value", "--base-bits", asks.base_bits, rule, legal=[16])
    families = [name for name in memory_software_names() if ":" not in name]
    if asks.software and asks.software.partition(":")[0] not in families:
        rule = "no such program is priced"
        raise JobError("registry/unknown", "--software", asks.software, rule, legal=families)
    most = max(layer.feed_forward.num_experts for layer in training.shape.layers)
    if not 1 <= asks.expert_imbalance <= max(most, 1):
        rule = f"{model} has no experts"
        if most:
            rule = f"{model} has {most} experts: the busiest takes no more than all, {most} means"
        legal = sorted({1, max(most, 1)})
        where = "--expert-imbalance"
        raise JobError("job/bad-value", where, asks.expert_imbalance, rule, legal=legal)


def _training(
    job: Job, model: PricedModel, asks: Question, adapters: Adapters | None
) -> tuple[Training, bool]:
    """The job as numbers, and whether nothing says how long it is."""
    config = adapters.config if adapters else model.config
    given = Training(
        config=config.with_dtype(job.model.dtype) if config else None,
        known_shape=None if config else model.sizes,
        method=job.train.method,
        lora=adapters.lora if adapters else None,
        batch_tokens=job.train.global_batch_tokens,
        epochs=job.train.epochs,
        steps=job.train.steps,
        master_dtype=job.train.master_dtype,
        checkpoints=job.plan.keep_checkpoints + 1 if job.plan.checkpoint_every else 1,
        seed=job.train.seed,
        choice=Choice(
            recompute=(job.plan.recompute,) if "plan.recompute" in job.origin else RECOMPUTE,
            row_tokens=job.plan.row_tokens,
        ),
        precision=asks.precision,
        base_bits=adapters.base_bits if adapters else 16,
        expert_imbalance=asks.expert_imbalance,
        software=asks.software,
    )
    if asks.seq_tokens:
        return _fixed_rows(job, given, model, asks)
    profile = _profile(job, model)
    if 0 < job.plan.row_tokens < profile.longest:
        rule = f"a document has {profile.longest} tokens and is never cut between rows"
        where = "plan.row_tokens"
        raise JobError("job/bad-value", where, job.plan.row_tokens, rule, legal=[profile.longest])
    is_open = not {"train.steps", "train.epochs"} & set(job.origin)
    epochs = 1.0 if asks.whole_epoch and is_open else job.train.epochs
    return replace(given, profile=profile, epochs=epochs), False


def _fixed_rows(
    job: Job, given: Training, model: PricedModel, asks: Question
) -> tuple[Training, bool]:
    """Rows of one length, that the model has positions for and that fill the batch."""
    seq, batch = asks.seq_tokens, given.batch_tokens
    if model.most_tokens and seq > model.most_tokens:
        rule = f"{model.name} has positions for {model.most_tokens:,} tokens"
        raise JobError("job/bad-value", "--seq", seq, rule, legal=[model.most_tokens])
    if batch % seq:
        rule = f"must be a whole number of rows of {seq:,} tokens"
        if "train.global_batch_tokens" not in job.origin:
            rule += "; it is the default: say how many tokens a step has"
        rows = nearest_numbers(batch, {max(1, batch // seq) * seq, (batch // seq + 1) * seq})
        raise JobError("job/bad-value", "--global-tokens", batch, rule, legal=rows)
    if job.plan.row_tokens % seq:
        rule = f"must be a whole number of rows of {seq:,} tokens, as --seq says"
        near = [each * seq for each in (job.plan.row_tokens // seq, job.plan.row_tokens // seq + 1)]
        legal = [each for each in near if each]
        raise JobError("job/bad-value", "plan.row_tokens", job.plan.row_tokens, rule, legal=legal)
    steps = given.steps
    if asks.total_tokens:
        steps = ceil(asks.total_tokens / batch)
    of_one_step = "train.steps" not in job.origin and not asks.total_tokens
    return replace(
        given, seq_tokens=seq, epochs=0.0, steps=1 if of_one_step else steps
    ), of_one_step


def _profile(job: Job, model: PricedModel) -> DataProfile:
    with _said_if_slow(f"counting the tokens of {job.data.source}; the next time they are known"):
        return profile_of(model, data_settings(job, model.config))


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
    return training.with_mesh(mesh), f"{asked.text}: the job's mesh ({shape}) was kept"
