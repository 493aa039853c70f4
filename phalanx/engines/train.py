"""Training: LoRA, full fine-tuning or from scratch, the same code on every device and world size.

    torchrun --nproc-per-node 2 -m phalanx.engines.train RUN_FOLDER [--resume]

The run folder holds `job.json` (sections of the resolved job) and `plan.json`. The run adds
`metrics.jsonl`, `trace.npz`, `train.json` (`TrainResult`), `checkpoints/`, `adapter/` (PEFT) and
`export/` (a Hugging Face folder, adapters merged).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.data.prepare import Prepared, prepare
from phalanx.engines.callbacks import Callback, load_callbacks
from phalanx.engines.events import tell
from phalanx.engines.process import rank_here, resident_bytes, start_process
from phalanx.engines.result import TrainResult
from phalanx.engines.run_folder import read_run
from phalanx.engines.sinks import require_sinks
from phalanx.engines.trainer_export import require_exports
from phalanx.engines.trainer_parts import Inputs
from phalanx.engines.trainer_run import TrainRun
from phalanx.engines.watch import Watch
from phalanx.errors import PhalanxError
from phalanx.job import Job
from phalanx.models.source import ModelSource, data_settings, model_source
from phalanx.plan import Plan
from phalanx.planner.here import hardware_here

Events = Callable[[Mapping[str, Any]], None]


def train(
    job: Job,
    plan: Plan,
    folder: str | Path,
    on_event: Events | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    resume: str | Path | bool | None = None,
) -> TrainResult:
    """Train what `job` asks as `plan.programs["train"]` says; every process of the role calls it.

    Of the role it reads: `mesh`, `specs` of the families data and tensor, `device`, `recompute`,
    `dtypes` ("master" of what is trained, "compute", "reduce"), `batch["row_tokens"]` (tokens of a
    packed row, i.e. of a micro-batch; default: the longest row) and `batch["row_multiple"]` (rows
    are filled up to a multiple of it; default `cost.training.row_multiple`).

    Data is prepared before the processes join, so no collective is open meanwhile.

    Args:
        job: resolved job; the global batch, the learning rate and the data are its.
        plan: made for this machine.
        folder: run folder, shared by all processes; rank 0 writes.
        on_event: called on rank 0 with {"kind": "log" | "evaluate" | "step" | "checkpoint" |
            "warning" | "stopped" | "done", ...}; numbers as in `metrics.jsonl`.
        callbacks: heard on every rank, with those of `train.callbacks`; see `engines.callbacks`.
        resume: a checkpoint folder to go on from; True: the newest of the run folder.

    Returns:
        The result, the same on every rank but for `samples`, which rank 0 has; it also writes
        `train.json`.

    Raises:
        WorldError: `world/failed` when the loss is no longer finite and `train.on_nonfinite` says
            stop.
        JobError, PlanError: from the data, the model or the plan, before the first step.
    """
    role, folder = plan.program("train"), Path(folder)
    rank, num_ranks = rank_here()
    notify: Events = on_event if rank == 0 and on_event else _ignore
    with Watch(folder, rank, num_ranks, hang_s=job.plan.hang_s) as watch:
        watch.note(-1, "data")
        source, data = prepared(job, lambda text: notify({"kind": "log", "text": text}))
        heard = (*callbacks, *load_callbacks(job.train.callbacks))
        with start_process(role.device, role.grid(), watch=watch) as process:
            process.barrier()  # a page of a library counts once, shared by all that have mapped it
            baseline_bytes = resident_bytes()
            inputs = Inputs(job, role, source, data, folder, heard, resume)
            return TrainRun(inputs, process, watch, notify, baseline_bytes).go()


def prepared(job: Job, log: Callable[[str], None]) -> tuple[ModelSource, Prepared]:
    """The model's files and the samples of a job; what is not in a cache yet is made by one
    process while the others wait at a file lock.

    Raises:
        PhalanxError: what could not be trained, logged or exported.
    """
    require_sinks(job.plan.log_to)
    source = model_source(job, log=log)
    require_exports(job, source)
    return source, prepare(data_settings(job, source.config), source.tokenizer_folder)


def _ignore(_event: Mapping[str, Any]) -> None:
    """Where nobody listens."""


def run_rank(
    folder: str | Path, on_event: Events | None = None, *, resume: bool = False
) -> TrainResult:
    """Train as one rank of the run that a folder describes.

    Args:
        resume: go on from the newest checkpoint of the folder.

    Raises:
        PlanError: for a plan of another machine or job; otherwise as `train`.
    """
    job, plan = read_run(folder)
    num_ranks = plan.program("train").grid().size
    plan.require_here(hardware_here(num_ranks), job)
    return train(job, plan, folder, on_event, resume=resume)


def main(arguments: list[str]) -> int:
    """Entry of a training process: the run folder, and --resume to go on from its newest
    checkpoint."""
    try:
        run_rank(arguments[0], tell, resume="--resume" in arguments[1:])
    except PhalanxError as error:
        print(f"{error.code}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
