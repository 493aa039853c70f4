"""A training job with what each cluster can do for it, as text and JSON need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.cost.bars import Bar
from phalanx.cost.goodput import RunCost, run_costs
from phalanx.job import Job
from phalanx.models.config import DTYPE_BYTES
from phalanx.models.spec import canonical_tensors, num_params, weight_bytes
from phalanx.planner.answers import Answer, PricedPlan
from phalanx.planner.given import Given
from phalanx.planner.largest import Largest
from phalanx.planner.models import PricedModel
from phalanx.planner.nearest import Nearest
from phalanx.planner.parts import PartsAnswer, num_trained
from phalanx.planner.sizes import Size
from phalanx.planner.training import Training

_MOMENT_BYTES = 8  # AdamW, float32, per trained element


@dataclass(frozen=True, kw_only=True)
class PricedJob:
    """A job with what each cluster can do for it.

    Attributes:
        answers: one per cluster, as they were asked for.
        narrow: of each answer, its best plan with fp8 products; None where that is not to be had.
        parts: of each answer, what a mixed cluster does with a plan for each part; None for others.
        nearest: jobs that fit, where no cluster does.
        sizes: devices of each kind that meet deadline and budget, where that was asked.
        largest: the largest context or micro-batch of each cluster, where that was asked.
        given: the plan of another program's file on each cluster, where one was named.
        of_one_step: nothing says how long the job is; hours and dollars are of one step.
        notes: what a reader has to know of how the job was read.
    """

    job: Job
    model: PricedModel
    training: Training
    answers: Sequence[Answer]
    parts: Sequence[PartsAnswer | None]
    narrow: Sequence[PricedPlan | None]
    nearest: Sequence[Nearest]
    sizes: Sequence[Size]
    largest: Sequence[Largest]
    given: Sequence[Given]
    of_one_step: bool
    notes: Sequence[str]

    @property
    def fits(self) -> bool:
        """Whether some cluster does it."""
        return any(each.fits for each in self.answers)

    @property
    def can_say(self) -> bool:
        """Whether what is known decides the question: a budget needs prices."""
        return self.fits or any(each.verdict != "no price" for each in self.answers)

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
        config = self.training.config
        return num_params(config) if config is not None else self.training.shape.num_params

    @property
    def num_trained(self) -> int:
        """Elements that get a gradient."""
        return num_trained(self.training)

    @property
    def checkpoint_bytes(self) -> float:
        """Disk space of checkpoints at their most: trained weights and moments."""
        per_element = DTYPE_BYTES[self.training.master_dtype] + _MOMENT_BYTES
        return float(self.training.checkpoints * self.num_trained * per_element)

    @property
    def model_bytes(self) -> float:
        """The weights on disk, once to read and once more as the result."""
        config = self.training.config
        return float(weight_bytes(config)) if config is not None else 2.0 * self.num_params

    def rented(self, each: Answer) -> Sequence[RunCost]:
        """The whole run with failures, in every way that its cluster can be rented."""
        if each.best is None or self.of_one_step:
            return ()
        hours, one_checkpoint = Bar(*each.hours), self.checkpoint_bytes / self.training.checkpoints
        return run_costs(each.asked.cluster, hours, checkpoint_bytes=one_checkpoint)

    def host_bytes(self, each: Answer) -> float:
        """Memory of a host while its ranks load: each holds one whole tensor at a time."""
        config, shape = self.training.config, self.training.shape
        if config is not None:
            largest = max(tensor.num_bytes for tensor in canonical_tensors(config).values())
        else:
            largest = 2 * shape.vocab * shape.hidden
        cluster = each.asked.cluster
        return float(largest * min(cluster.num_devices, cluster.machine.devices_per_host))

    def host_states(self, each: Answer) -> float:
        """Memory of a host that its ranks' states take while they train, where they live there."""
        cluster, away = each.asked.cluster, each.best.sized.host_bytes if each.best else 0.0
        return away * min(cluster.num_devices, cluster.machine.devices_per_host)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        profile = self.training.profile
        rows = {"seq_tokens": self.training.seq_tokens}
        return {
            "fits": self.fits,
            "model": {
                "name": self.model.name,
                "source": self.model.source,
                "params": self.num_params,
                "trained": self.num_trained,
            },
            "data": profile.to_dict() if profile is not None else rows,
            "method": self.training.method,
            "lora_rank": self.training.lora.rank if self.training.lora else 0,
            "lora_targets": list(self.training.lora.targets) if self.training.lora else [],
            "base_bits": self.training.base_bits,
            "precision": self.training.precision,
            "steps": self.training.num_steps,
            "of_one_step": self.of_one_step,
            "batch_tokens": self.training.batch_tokens,
            "checkpoint_bytes": self.checkpoint_bytes,
            "model_bytes": self.model_bytes,
            "clusters": [
                each.to_dict()
                | {"host_bytes": self.host_bytes(each)}
                | {"rented": [run.to_dict() for run in self.rented(each)]}
                | ({"by_parts": parts.to_dict()} if parts is not None else {})
                | ({"step_s_in_fp8": narrow.total_s} if narrow is not None else {})
                for each, parts, narrow in zip(self.answers, self.parts, self.narrow)
            ],
            "nearest": [
                {"change": each.change, "flags": each.flags} | each.answer.to_dict()
                for each in self.nearest
            ],
            "sizes": [each.to_dict() for each in self.sizes],
            "largest": [each.to_dict() for each in self.largest],
            "given": [each.to_dict() for each in self.given],
            "notes": list(self.notes),
        }
