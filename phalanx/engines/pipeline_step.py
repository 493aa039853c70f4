"""The micro-batches of a step through the stages of a pipeline, forward and backward.

Legend: S packed tokens that this rank computes of a row, D model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.data.batches import MicroBatch, StepBatch
from phalanx.engines.row_loss import DropoutKeys, hidden_loss, row_inputs
from phalanx.engines.trainer_model import TrainModel
from phalanx.engines.user_loss import LossFunction
from phalanx.policy import Step
from phalanx.worlds.pipeline_plan import PipelinePlan, PlannedShapes
from phalanx.worlds.torch_pipelining import TorchPipeline


class PipelineStep:
    """Runs the stages of this rank in the order of the plan.

    Every rank of a pipeline deals the same rows, so all know the size of each message beforehand:
    micro-batches may have any lengths, and other ones in every step.

    Args:
        model: with stages.
        device: where the tensors of a batch go.
        loss: of the counted positions of a row, instead of cross-entropy.
    """

    def __init__(
        self, model: TrainModel, device: torch.device, loss: LossFunction | None = None
    ) -> None:
        assert model.stages is not None
        self.model, self.device, self.loss = model, device, loss
        self._stages = model.stages
        self._views = self._stages.views(model.decoder)
        self._uses = self._stages.uses(model.decoder)
        self._lists: dict[int, list[list[Step]]] = {}

    def run(self, batch: StepBatch, dropout: DropoutKeys | None = None) -> Tensor:
        """All passes of a step; gradients add up, and are summed over data axes as they complete.

        Returns:
            The sum of the micro-batches' losses, detached; zero on ranks without the last stage.
        """
        rows = batch.micro_batches
        self.model.data.begin_step(len(rows), self._uses)
        inputs = [row_inputs(self.model, row, self.device, dropout) for row in rows]
        tokens = [tokens_S for tokens_S, _ in inputs]
        pipeline = TorchPipeline(
            self._plan([len(tokens_S) for tokens_S in tokens]),
            self._views,
            self._loss_of,
            group=self._stages.group,
            device=self.device,
            axis=self._stages.axis,
        )
        losses = pipeline.step(
            tokens,
            rows,
            num_counted_global=batch.num_counted_global,
            keywords=[keywords for _, keywords in inputs],
        )
        total = torch.zeros((), device=self.device)
        for loss in losses:
            total = total + loss
        return total

    def _loss_of(self, hidden_SD: Tensor, row: MicroBatch, *, num_counted_global: Any) -> Tensor:
        return hidden_loss(self.model, hidden_SD, row, num_counted_global, self.device, self.loss)

    def _plan(self, lengths: Sequence[int]) -> PipelinePlan:
        """The order of so many micro-batches, and what travels between stages."""
        width, tensor = self.model.decoder.config.hidden_size, self.model.tensor
        parts = tensor.degree if tensor.splits_tokens else 1
        inside = [(length // parts, width) for length in lengths]
        shapes = PlannedShapes(
            inputs=[(length,) for length in lengths],
            outputs=[inside] * self._stages.num_stages,
            dtype=self.model.compute_dtype,
            input_dtype="int64",
        )
        if len(lengths) not in self._lists:
            order = self._stages.order
            self._lists[len(lengths)] = order.order(self._stages.num_ranks, len(lengths))
        return PipelinePlan(
            lists=self._lists[len(lengths)],
            rank_of_stage=self._stages.rank_of_stage,
            shapes=shapes,
        )
