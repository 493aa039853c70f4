"""One optimizer step of one process: micro-batches forward and backward, then the update."""

from __future__ import annotations

from collections.abc import Iterator
from time import process_time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.data.batches import StepBatch
from phalanx.engines.fingerprint import Fingerprints
from phalanx.engines.guard import Guard
from phalanx.engines.memory import return_free_memory
from phalanx.engines.optim import ShardedAdamW
from phalanx.engines.pipeline_step import PipelineStep
from phalanx.engines.row_loss import DropoutKeys, row_loss
from phalanx.engines.trainer_model import TrainModel
from phalanx.engines.user_loss import LossFunction
from phalanx.worlds.torch_log import SpanLog


class Work(NamedTuple):
    """A part of a step: phase "F", "B", "P" (all passes of a pipeline) or "O" (optimizer), and
    micro-batch (-1: none)."""

    phase: str
    item: int


class StepSpans(NamedTuple):
    """When the parts of a step ran; read later, so that no device is waited for.

    Attributes:
        log: of parts, and of what a pipeline did.
        number: of the step.
        pipeline: what ran the passes, where the model is cut into stages.
    """

    log: SpanLog
    number: int
    pipeline: PipelineStep | None

    def parts(self, origin_s: float) -> list[tuple[Work, float, float]]:
        """Parts with start and end, in seconds since `origin_s` of `time.perf_counter`."""
        late_s = self.log.origin_s - origin_s
        return [
            (work, start_s + late_s, end_s + late_s)
            for work, start_s, end_s in self.log.spans_s()
            if isinstance(work, Work)
        ]

    def action_rows(self, origin_s: float) -> list[dict[str, Any]]:
        """Trace rows of a pipeline's passes and messages, by the same clock."""
        if self.pipeline is None:
            return []
        rows, late_s = self.pipeline.trace_rows(self.log, self.number), self.log.origin_s - origin_s
        return [row | {"start_s": row["start_s"] + late_s} for row in rows]


class StepOutcome(NamedTuple):
    """What a step computed.

    Attributes:
        sums: over all ranks, still on the device: mean loss of the global batch, ranks that got a
            signal to stop, ranks of which a callback asks to stop.
        grad_norm: before clipping, still on the device.
        cpu_s: processor time of this process, per thread; less than the step's wall time where it
            waited for others or other programs had the cores.
    """

    sums: Tensor
    grad_norm: Tensor
    cpu_s: float


class TrainStep:
    """Runs steps; equal on every world size and for every split into micro-batches.

    The loss of a micro-batch is a sum divided by the targets of the whole global batch, which every
    rank knows from the data, so gradients only have to be added up.

    Args:
        model: bound decoder.
        optimizer: over its trainable parameters.
        device: where the tensors of a batch go.
        seed: of dropout.
        guard: decides whether an update happens.
        loss: of the counted positions of a row, instead of cross-entropy.
        record: summarises what it is told to.
    """

    def __init__(
        self,
        model: TrainModel,
        optimizer: ShardedAdamW,
        device: torch.device,
        seed: int,
        *,
        guard: Guard,
        loss: LossFunction | None = None,
        record: Fingerprints | None = None,
    ) -> None:
        self.model, self.optimizer, self.device, self.seed = model, optimizer, device, seed
        self.guard, self.loss, self.record = guard, loss, record
        self._pipeline = None if model.stages is None else PipelineStep(model, device, loss)
        # two, so that the spans of a step can be read while the next one runs
        self._logs = (SpanLog(device), SpanLog(device))

    def spans(self, number: int) -> StepSpans:
        """When the parts of step `number` ran; kept until step `number + 2`."""
        return StepSpans(self._logs[number % 2], number, self._pipeline)

    def run(
        self, batch: StepBatch, number: int, lr: float, stops: tuple[bool, bool] = (False, False)
    ) -> StepOutcome:
        """One step; nothing is read back from the device.

        Args:
            stops: this rank wants the run to end after this step: by a signal, by a callback.
        """
        start_s = process_time()
        log = self._logs[number % 2]
        log.restart()
        total = self._passes(batch, number, log)
        norm = total
        for _ in log.follow(iter([Work("O", -1)])):
            norm = self._update(lr)
        # ranks that share the rows of another one (of its tensor group) count once
        loss = total * float(self.model.counts_loss)
        # filled on the device: a copy from the host would wait for it
        sums = torch.stack([loss, *(torch.full_like(loss, float(stop)) for stop in stops)])
        dist.all_reduce(sums)
        return StepOutcome(sums, norm, (process_time() - start_s) / torch.get_num_threads())

    def _passes(self, batch: StepBatch, number: int, log: SpanLog) -> Tensor:
        """All forward and backward passes; returns this rank's loss."""
        total = torch.zeros((), device=self.device)
        if self._pipeline is not None:
            for _ in log.follow(iter([Work("P", -1)])):
                total = self._pipeline.run(batch, self._dropout(number), log)
            return total
        loss = total
        for work in log.follow(_work_of(len(batch.micro_batches))):
            if work.phase == "F":
                loss = self._forward(batch, number, work.item)
                total = total + loss.detach()
            else:
                loss.backward()
                if self.device.type == "cpu":
                    return_free_memory()
        return total

    def _update(self, lr: float) -> Tensor:
        """Sum the gradients and change the weights; returns the gradient's norm."""
        self.model.finish_step()
        if self.record is not None:
            self.record.gradients()
        norm = self.optimizer.norm()
        self.optimizer.step(lr, norm=norm, skip=self.guard.skip(norm))
        self.model.data.finish_update()
        return norm

    def _forward(self, batch: StepBatch, number: int, item: int) -> Tensor:
        self.model.data.begin_item(item, len(batch.micro_batches))
        return row_loss(
            self.model,
            batch.micro_batches[item],
            batch.num_counted_global,
            self.device,
            self._dropout(number),
            self.loss,
        )

    def _dropout(self, number: int) -> DropoutKeys | None:
        drops = self.model.lora is not None and self.model.lora.dropout > 0.0
        is_recorded = self.record is not None and self.record.is_recording  # by tokens' places
        return DropoutKeys(self.seed, number) if drops or is_recorded else None


def _work_of(num_items: int) -> Iterator[Work]:
    for item in range(num_items):
        yield Work("F", item)
        yield Work("B", item)
