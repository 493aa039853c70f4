"""What a training run works with: model, samples, optimizer, guard, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.cost.training import counted_weight, row_multiple
from phalanx.data.batches import SampleStream, num_steps
from phalanx.data.prepare import Prepared
from phalanx.engines.callbacks import Callback
from phalanx.engines.checkpoint import Checkpoints, Progress, restore, restore_latest
from phalanx.engines.evaluate import HeldOut
from phalanx.engines.fingerprint import Fingerprints
from phalanx.engines.guard import Guard
from phalanx.engines.offload import make_optimizer
from phalanx.engines.operator_profile import OperatorProfile
from phalanx.engines.optim import ShardedAdamW
from phalanx.engines.process import Process
from phalanx.engines.schedule import learning_rate
from phalanx.engines.trainer_model import TrainModel, build_model
from phalanx.engines.trainer_step import TrainStep
from phalanx.engines.user_loss import load_loss
from phalanx.engines.weight_check import WeightCheck
from phalanx.errors import JobError, WorldError
from phalanx.job import Job
from phalanx.models.source import ModelSource
from phalanx.plan import RoleProgram


@dataclass(frozen=True)
class Inputs:
    """What a run is made from.

    Attributes:
        resume: a checkpoint to go on from; True: the newest of the run folder; None: a new run.
    """

    job: Job
    role: RoleProgram
    source: ModelSource
    data: Prepared
    folder: Path
    callbacks: Sequence[Callback]
    resume: str | Path | bool | None


class Parts:
    """All that a run needs for its steps; every rank makes its own.

    Args:
        on_saved: hears of a checkpoint that is complete: its progress, its kind, where it is.
        on_not_saved: hears of one that could not be written.

    Attributes:
        num_steps: of the whole run.
        weights: compares replicas.
        rows: how samples become rows of this rank, as `data.batches.step_batch` takes it.
    """

    def __init__(
        self,
        inputs: Inputs,
        process: Process,
        on_saved: Callable[[Progress, str, Path], None],
        on_not_saved: Callable[[WorldError], None],
    ) -> None:
        self.inputs, self.process = inputs, process
        _require_same(inputs, process)
        train, device = inputs.job.train, process.device
        self.model: TrainModel = build_model(inputs.job, inputs.role, inputs.source, process)
        self.weights = WeightCheck(self.model.decoder, process)
        self.stream = SampleStream(inputs.data.train, train.seed)
        self.num_steps = train.steps
        if train.epochs:
            self.num_steps = num_steps(self.stream, train.epochs, train.global_batch_tokens)
        self.rows = self._rows()
        self.held_out = HeldOut(
            inputs.data.held_out,
            self.model,
            device,
            seed=train.seed,
            max_rows=train.eval_rows,
            rows=self.rows,
        )
        stages = self.model.stages
        self.optimizer: ShardedAdamW = make_optimizer(
            self.model.data.named_held(self.model.decoder.named_parameters()),
            offload=inputs.job.plan.offload,
            folder=inputs.folder,
            master=getattr(torch, self.model.master_dtype),
            weight_decay=train.weight_decay,
            clip_norm=train.clip_norm,
            betas=(train.beta1, train.beta2),
            group=None if stages is None else stages.group,
            counted_elsewhere=() if stages is None else stages.tied,
        )
        self.guard = Guard(
            device,
            on_nonfinite=train.on_nonfinite,
            spike_factor=train.spike_factor,
            on_spike=train.on_spike,
        )
        self.fingerprints = Fingerprints(
            self.model,
            process.rank,
            inputs.folder,
            inputs.job.plan.record_steps,
            is_new=not inputs.resume,
        )
        self.stepper = TrainStep(
            self.model,
            self.optimizer,
            device,
            train.seed,
            guard=self.guard,
            loss=load_loss(train.loss) if train.loss else None,
            record=self.fingerprints,
        )
        layers = self.model.decoder.model.layers.items()
        units = {f"model.layers.{at}": layer for at, layer in layers}
        self.profile = OperatorProfile(process.rank, units, device)
        self.checkpoints = self._checkpoints(on_saved, on_not_saved)

    def restore(self, on_damaged: Callable[[JobError], None]) -> Progress | None:
        """Weights, optimizer and counters of the checkpoint to go on from; None for a new run.

        Args:
            on_damaged: hears of a newer checkpoint that is damaged.

        Raises:
            JobError: `job/not-found` where there is none; as `checkpoint.restore`.
        """
        resume, job = self.inputs.resume, self.inputs.job
        if not resume:
            return None
        holders = (self.model, self.optimizer, self.process)
        asked = {"job_key": job.result_key, "sections": job.result_table}
        if resume is not True:
            return restore(resume, *holders, **asked)
        seen: list[JobError] = []
        found = restore_latest(self.checkpoints.folder, *holders, **asked, on_damaged=seen.append)
        if found is None:
            rule = "holds no checkpoint to go on from"
            rule += "".join(f"; {each.value} {each.rule}" for each in seen)
            raise JobError("job/not-found", "--resume", self.checkpoints.folder, rule)
        for error in seen:
            on_damaged(error)
        return found[1]

    def learning_rate(self, number: int) -> float:
        """Of a step."""
        train = self.inputs.job.train
        return learning_rate(
            number,
            schedule=train.schedule,
            peak=train.lr,
            warmup_steps=train.warmup_steps,
            num_steps=self.num_steps,
            final_frac=train.final_lr_frac,
            decay_frac=train.decay_frac,
        )

    def answers(self) -> list[list[int]]:
        """Greedy answers to some held-out rows, as tokens; none where nothing is held out."""
        eos_tokens = self.inputs.source.config.eos_tokens
        return self.held_out.answers(eos_tokens) if self.held_out else []

    def _rows(self) -> dict[str, Any]:
        batch, device = self.inputs.role.batch, self.inputs.role.device
        multiple = int(batch.get("row_multiple", row_multiple(device)))
        stages = self.model.stages
        return {
            "row_tokens": max(self.inputs.data.longest, int(batch.get("row_tokens", 0))),
            "num_ranks": self.model.data.num_ranks,
            "rank": self.model.data.rank,
            "counted_weight": counted_weight(self.inputs.source.config),
            "row_multiple": lcm(multiple, self.model.row_multiple),
            "least_rows": 1 if stages is None else stages.order.least_items(stages.num_ranks),
        }

    def _checkpoints(
        self,
        on_saved: Callable[[Progress, str, Path], None],
        on_failure: Callable[[WorldError], None],
    ) -> Checkpoints:
        job = self.inputs.job
        checkpoints = Checkpoints(
            self.inputs.folder / "checkpoints",
            self.model,
            self.optimizer,
            self.process,
            keep=job.plan.keep_checkpoints,
            job_key=job.result_key,
            sections=job.result_table,
            on_saved=on_saved,
            on_failure=on_failure,
        )
        periodic = bool(job.plan.checkpoint_every)
        checkpoints.require_space(periodic=periodic, with_best=job.train.keep_best)
        return checkpoints


def _require_same(inputs: Inputs, process: Process) -> None:
    """A file that is edited while ranks start would give them different samples.

    Raises:
        WorldError: `train/inputs` on all ranks, naming one that differs from rank 0.
    """
    mine = (inputs.job.result_key, inputs.data.path.name)
    found = [mine] * process.world_size
    if process.world_size > 1:
        dist.all_gather_object(found, mine)
    for rank, (key, data) in enumerate(found):
        for what, value, first in (("job", key, found[0][0]), ("data", data, found[0][1])):
            if value != first:
                rule = f"is not {first}, which rank 0 has; start again when nobody edits it"
                raise WorldError("train/inputs", f"{what} of rank {rank}", value, rule)
