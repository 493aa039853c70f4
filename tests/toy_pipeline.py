"""A residual model cut into stages, its data, and its gradients without a pipeline.

Legend: S tokens of one micro-batch (no two alike), D model, F feed-forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.policy import Step
from phalanx.worlds.pipeline_plan import PipelinePlan, PlannedShapes

WIDTH, VOCABULARY, IGNORED = 6, 11, -100
ITEM_TOKENS = (3, 1, 7, 0, 5)  # no two alike, one empty


class Residual(nn.Module):
    """x + down(gelu(up(x)))."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_SD: Tensor) -> Tensor:
        return x_SD + self.down(F.gelu(self.up(x_SD)))


class Toy(NamedTuple):
    """Stages, micro-batches and targets; the same on every rank."""

    stages: list[nn.Module]
    inputs: list[Tensor]
    targets: list[Tensor]

    @property
    def num_counted(self) -> int:
        """Counted tokens of all micro-batches."""
        return sum(int((target != IGNORED).sum()) for target in self.targets)

    def loss(self, item: int) -> Tensor:
        """Loss of a micro-batch through all stages in one piece."""
        x_SD = self.inputs[item]
        for stage in self.stages:
            x_SD = stage(x_SD)
        return token_loss(x_SD, self.targets[item], num_counted_global=self.num_counted)

    def whole_loss(self) -> Tensor:
        """Mean over the counted tokens of all micro-batches, computed as one batch."""
        x_SD = torch.cat(self.inputs)
        for stage in self.stages:
            x_SD = stage(x_SD)
        return F.cross_entropy(x_SD, torch.cat(self.targets), ignore_index=IGNORED)

    def gradients(self, stage: int) -> list[Tensor]:
        """Of the parameters of a stage, as they stand."""
        return [parameter.grad.clone() for parameter in self.stages[stage].parameters()]


def token_loss(logits_SV: Tensor, target_S: Tensor, *, num_counted_global: int) -> Tensor:
    """Sum over the counted tokens of one micro-batch, divided by the global number of them."""
    total = F.cross_entropy(logits_SV, target_S, ignore_index=IGNORED, reduction="sum")
    return total / num_counted_global


def make_toy(num_stages: int, item_tokens: Sequence[int], dtype: torch.dtype) -> Toy:
    """Two residual layers per stage, a head in the last; about a third of the tokens count not."""
    draw = torch.Generator().manual_seed(7)
    stages = [nn.Sequential(Residual(), Residual()) for _ in range(num_stages)]
    stages[-1].append(nn.Linear(WIDTH, VOCABULARY))
    for parameter in (p for stage in stages for p in stage.to(dtype).parameters()):
        value = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        parameter.data.copy_(value * 0.3)
    inputs, targets = [], []
    for num_tokens in item_tokens:
        inputs.append(torch.randn(num_tokens, WIDTH, generator=draw, dtype=torch.float64).to(dtype))
        target_S = torch.randint(0, VOCABULARY, (num_tokens,), generator=draw)
        dropped_S = torch.rand(num_tokens, generator=draw) < 0.3
        targets.append(target_S.masked_fill(dropped_S, IGNORED))
    return Toy(stages, inputs, targets)


def toy_plan(
    lists: Sequence[Sequence[Step]],
    rank_of_stage: Sequence[int],
    item_tokens: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> PipelinePlan:
    """The plan of a toy: every boundary is S x D, the last output S x V."""
    inside = [(num_tokens, WIDTH) for num_tokens in item_tokens]
    last = [(num_tokens, VOCABULARY) for num_tokens in item_tokens]
    name = str(dtype).removeprefix("torch.")
    outputs = [*[inside] * (len(rank_of_stage) - 1), last]
    shapes = PlannedShapes(inputs=inside, outputs=outputs, dtype=name, input_dtype=name)
    return PipelinePlan(lists=lists, rank_of_stage=tuple(rank_of_stage), shapes=shapes)


def accumulated(toy: Toy, stage: int, items: Sequence[int]) -> list[Tensor]:
    """Gradients of a stage added up over micro-batches in this order, without a pipeline."""
    parameters = list(toy.stages[stage].parameters())
    total: list[Tensor] = []
    for item in items:
        each = torch.autograd.grad(toy.loss(item), parameters)
        total = [a + b for a, b in zip(total, each)] if total else list(each)
    return total
