"""Our own engine, called as `phalanx train` calls it, on one process or two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from peers.case import LEARNING_RATE, RANK, TARGETS, Case
from peers.parts import profiled
from phalanx.data.batches import MicroBatch, StepBatch
from phalanx.engines.guard import Guard
from phalanx.engines.optim import ShardedAdamW
from phalanx.engines.process import start_process
from phalanx.engines.trainer_model import build_model
from phalanx.engines.trainer_step import TrainStep
from phalanx.job import Job, load_job, parse_flags
from phalanx.mesh import Mesh
from phalanx.models.source import model_source
from phalanx.plan import RoleProgram

__all__ = ["NAME", "NUM_PROCESSES", "build", "profiled"]

NAME = "Phalanx"
NUM_PROCESSES = 1
ROW_MULTIPLE = 32
FSDP = {"family": "data", "name": "fsdp", "reshard_after_forward": False}


def build(case: Case) -> Callable[[int], None]:
    """A step of the engine; one rank needs no data policy (`planner.here` leaves it out)."""
    return built(case, {"shard": 1}, [])


def job_of(case: Case) -> Job:
    """The job whose model and adapters the case has."""
    flags = ["--model.name", str(case.model), "--model.dtype", "bfloat16"]
    flags += ["--train.lora_rank", str(RANK), "--train.lora_alpha", str(2.0 * RANK)]
    job = load_job(None, parse_flags(flags))
    assert job.train.lora_targets in ((), TARGETS)
    return job


def built(
    case: Case,
    mesh: dict[str, int],
    specs: list[dict],
    *,
    order: Mapping[str, object] | None = None,
    stages: Sequence[tuple[int, int]] = (),
) -> Callable[[int], None]:
    """The engine on a mesh; the process group stays open until the process ends.

    Args:
        order, stages: of a pipeline: its schedule, and the layers of each stage.
    """
    role = RoleProgram(
        pool="here",
        mesh=mesh,
        specs=specs,
        order=order or {},
        batch={"stages": [list(stage) for stage in stages]} if stages else {},
        dtypes={"master": "float32", "compute": "bfloat16", "reduce": "float32"},
    )
    stack = ExitStack()
    process = stack.enter_context(start_process("cpu", Mesh(mesh)))
    job = job_of(case)
    model = build_model(job, role, model_source(job), process)
    of_stages = model.stages
    optimizer = ShardedAdamW(
        model.data.named_held(model.decoder.named_parameters()),
        clip_norm=1.0,
        group=None if of_stages is None else of_stages.group,
        counted_elsewhere=() if of_stages is None else of_stages.tied,
    )
    guard = Guard(process.device)
    stepper = TrainStep(model, optimizer, process.device, 0, guard=guard)
    rank, size = model.data.rank, model.data.num_ranks

    def step(number: int) -> None:
        rows = case.rows(number)[rank::size]
        counted, tokens = case.num_counted(number), sum(len(r.tokens_S) for r in case.rows(number))
        batch = StepBatch(tuple(map(_micro_batch, rows)), counted, tokens, 0)
        stepper.run(batch, number, LEARNING_RATE)

    step.stack = stack  # type: ignore[attr-defined]
    return step


def _micro_batch(row) -> MicroBatch:
    num_documents = len(row.document_starts)
    made = MicroBatch(
        tokens_S=row.tokens_S,
        document_starts=row.document_starts,
        counted_N=row.counted_N,
        targets_N=row.targets_N,
        samples=tuple(range(num_documents)),
        offsets=tuple(int(start) for start in np.asarray(row.document_starts)),
    )
    return made.extended(ROW_MULTIPLE)
