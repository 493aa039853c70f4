"""The micro-batches of a step through the stages of a pipeline, forward and backward.

Legend: S packed tokens that this rank computes of a row, D model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.data.batches import MicroBatch, StepBatch
from phalanx.engines.memory import return_free_memory
from phalanx.engines.row_loss import DropoutKeys, hidden_loss, row_inputs
from phalanx.engines.trainer_model import TrainModel
from phalanx.engines.user_loss import LossFunction
from phalanx.lower.data import round_items
from phalanx.worlds.pipeline_plan import PipelinePlan, PlannedShapes
from phalanx.worlds.torch_log import SpanLog
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
        self._pipelines: dict[tuple[int, int], TorchPipeline] = {}
        self._latest: dict[int, TorchPipeline] = {}  # by log

    def run(
        self, batch: StepBatch, dropout: DropoutKeys | None = None, log: SpanLog | None = None
    ) -> Tensor:
        """All passes of a step; gradients add up, and are summed over data axes as they complete.

        Args:
            log: that their spans are added to; None: they are forgotten.

        Returns:
            The sum of the micro-batches' losses, detached; zero on ranks without the last stage.
        """
        rows = batch.micro_batches
        inputs = [row_inputs(self.model, row, self.device, dropout) for row in rows]
        tokens = [tokens_S for tokens_S, _ in inputs]
        pipeline = self._pipeline([len(tokens_S) for tokens_S in tokens], log)
        self._latest[id(log)] = pipeline
        in_a_row = round_items(pipeline.plan.lists[self._stages.rank])
        self.model.data.begin_step(len(rows), self._uses, in_a_row)
        losses = pipeline.step(
            tokens,
            rows,
            num_counted_global=batch.num_counted_global,
            keywords=[keywords for _, keywords in inputs],
        )
        # the same dtype on ranks that see no loss
        dtype = torch.promote_types(getattr(torch, self.model.compute_dtype), torch.float32)
        total = torch.zeros((), dtype=dtype, device=self.device)
        for loss in losses:
            total = total + loss
        return total

    def trace_rows(self, log: SpanLog, number: int) -> list[dict[str, Any]]:
        """Passes and messages of the latest step that was logged there, as rows of a trace."""
        latest = self._latest.get(id(log))
        return [] if latest is None else latest.trace_rows(number)

    def _loss_of(self, hidden_SD: Tensor, row: MicroBatch, *, num_counted_global: Any) -> Tensor:
        return hidden_loss(self.model, hidden_SD, row, num_counted_global, self.device, self.loss)

    def _pipeline(self, lengths: Sequence[int], log: SpanLog | None) -> TorchPipeline:
        """For micro-batches of these lengths; lists and stages are made once per number of them."""
        shapes, key = self._shapes(lengths), (len(lengths), id(log))
        if key in self._pipelines:
            self._pipelines[key].set_shapes(shapes)
            return self._pipelines[key]
        stages = self._stages
        plan = PipelinePlan(
            lists=stages.order.order(stages.num_ranks, len(lengths)),
            rank_of_stage=stages.rank_of_stage,
            shapes=shapes,
        )
        self._pipelines[key] = TorchPipeline(
            plan,
            self._views,
            self._loss_of,
            group=stages.group,
            device=self.device,
            axis=stages.axis,
            log=log,
            after=self._after,
        )
        return self._pipelines[key]

    def _shapes(self, lengths: Sequence[int]) -> PlannedShapes:
        """What travels between stages: where tokens are split, a rank's own ones."""
        width, tensor = self.model.decoder.config.hidden_size, self.model.tensor
        parts = tensor.degree if tensor.splits_tokens else 1
        inside = [(length // parts, width) for length in lengths]
        return PlannedShapes(
            inputs=[(length,) for length in lengths],
            outputs=[inside] * self._stages.num_stages,
            dtype=self.model.compute_dtype,
            input_dtype="int64",
        )

    def _after(self, kind: str, stage: int, _item: int) -> None:
        """A pass has ended."""
        if kind == "W" and stage > 0:  # torch wrote these gradients past autograd's hooks
            self.model.data.note(self._views[stage].parameters())
        is_through = kind in ("B", "W") and stage == min(self._views)  # of all stages of this rank
        if is_through and self.device.type == "cpu":
            return_free_memory()
