"""What is refused before the processes of a run start, because it would fail later or do nothing.

No torch, but for a loss of the user's own.
"""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.data.prepare import Prepared
from phalanx.engines.callbacks import load_callbacks
from phalanx.engines.sinks import require_sinks
from phalanx.errors import JobError
from phalanx.job import Job
from phalanx.models.adapter_folder import lora_of
from phalanx.models.folders import require_free
from phalanx.models.source import ModelSource
from phalanx.models.spec import weight_bytes
from phalanx.planner.here import training_shape


def require_writable(folder: Path) -> None:
    """Refuse a folder that cannot be made, without making it."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise JobError("cli/file", "--folder", folder, f"cannot be made: {place} is no folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise JobError("cli/file", "--folder", folder, f"cannot be made: {place} is not writable")


def require_outcome(job: Job, folder: Path, num_ranks: int, source: ModelSource) -> None:
    """Refuse what would fail only after the processes have started, or after the last step."""
    _require_effect(job)
    training_shape(job, source.config, num_ranks)
    lora_of(job, source.config)
    require_sinks(job.plan.log_to)
    load_callbacks(job.train.callbacks)
    if job.train.loss:
        if job.train.label_smoothing:
            rule = "smooths the built-in loss, and train.loss takes its place; smooth in your own"
            where, value = "train.label_smoothing", job.train.label_smoothing
            raise JobError("job/bad-value", where, value, rule, legal=[0.0])
        from phalanx.engines.user_loss import load_loss  # torch, as the loss itself

        load_loss(job.train.loss)
    if job.plan.exports:
        require_free(folder, weight_bytes(source.config))


def _require_effect(job: Job) -> None:
    """Refuse to count evaluations where there are none."""
    train = job.train
    if train.early_stop and not train.eval_every:
        rule = "counts evaluations, and none is made before the last step; set train.eval_every"
        raise JobError("job/bad-value", "train.early_stop", train.early_stop, rule, legal=[0])


def require_held_out(job: Job, data: Prepared) -> None:
    """Refuse to look for the lowest held-out loss where no row was held out."""
    train = job.train
    if not len(data.held_out) and (train.early_stop or train.keep_best):
        rule = (
            f"no row is held out of {len(data.train)}, and train.early_stop and train.keep_best "
            "need some; hold out more or name data.held_out_source"
        )
        raise JobError("data/empty", "data.held_out_frac", job.data.held_out_frac, rule)
