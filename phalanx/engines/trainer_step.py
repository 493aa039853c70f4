"""One optimizer step of one process: micro-batches forward and backward, then the update."""

from __future__ import annotations

from collections.abc import Iterator
from time import process_time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.data.batches import StepBatch
from phalanx.engines.guard import Guard
from phalanx.engines.memory import return_free_memory
from phalanx.engines.optim import ShardedAdamW
from phalanx.engines.row_loss import DropoutKeys, row_loss
from phalanx.engines.trainer_model import TrainModel
from phalanx.engines.user_loss import LossFunction
from phalanx.worlds.torch_log import SpanLog


class Work(NamedTuple):
    """A part of a step: phase "F", "B" or "O" (optimizer), and micro-batch (-1: none)."""

    phase: str
    item: int


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
    ) -> None:
        self.model, self.optimizer, self.device, self.seed = model, optimizer, device, seed
        self.guard, self.loss = guard, loss
        # two, so that the spans of a step can be read while the next one runs
        self._spans = (SpanLog(device), SpanLog(device))

    def spans(self, number: int) -> SpanLog:
        """When the parts of step `number` ran; kept until step `number + 2`."""
        return self._spans[number % 2]

    def run(
        self, batch: StepBatch, number: int, lr: float, stops: tuple[bool, bool] = (False, False)
    ) -> StepOutcome:
        """One step; nothing is read back from the device.

        Args:
            stops: this rank wants the run to end after this step: by a signal, by a callback.
        """
        start_s = process_time()
        spans = self.spans(number)
        spans.restart()
        total = torch.zeros((), device=self.device)
        norm = loss = total
        for work in spans.follow(_work_of(len(batch.micro_batches))):
            if work.phase == "F":
                loss = self._forward(batch, number, work.item)
                total = total + loss.detach()
            elif work.phase == "B":
                loss.backward()
                if self.device.type == "cpu":
                    return_free_memory()
            else:
                self.model.finish_step()
                norm = self.optimizer.norm()
                self.optimizer.step(lr, norm=norm, skip=self.guard.skip(norm))
        # ranks that share the rows of another one (of its tensor group) count once
        loss = total * float(self.model.counts_loss)
        # filled on the device: a copy from the host would wait for it
        sums = torch.stack([loss, *(torch.full_like(loss, float(stop)) for stop in stops)])
        dist.all_reduce(sums)
        return StepOutcome(sums, norm, (process_time() - start_s) / torch.get_num_threads())

    def _forward(self, batch: StepBatch, number: int, item: int) -> Tensor:
        self.model.data.begin_item(item, len(batch.micro_batches))
        return row_loss(
            self.model,
            batch.micro_batches[item],
            batch.num_counted_global,
            self.device,
            DropoutKeys(self.seed, number) if self._drops else None,
            self.loss,
        )

    @property
    def _drops(self) -> bool:
        return self.model.lora is not None and self.model.lora.dropout > 0.0


def _work_of(num_items: int) -> Iterator[Work]:
    for item in range(num_items):
        yield Work("F", item)
        yield Work("B", item)
    yield Work("O", -1)
