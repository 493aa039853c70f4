"""What a pipeline over replicas computes, in one process that adds everything up in the same order.

Rounding depends on the order of additions, so a run over many ranks differs from a plain one in the
last bits, and a mistake that is as small looks alike. This reference takes the run's own lists: the
gradient of each weight is the sum over micro-batches in the order in which its stage ends them,
then over data ranks, then over the two ends of a tied embedding. If a run differs from it by one
bit, the difference is no rounding.

Source: Chu et al., "Scaling Llama 3 Training with Efficient Parallelism Strategies", ISCA 2025,
section 6.2. Limits: two data ranks at most (of more, the algorithm of the all-reduce decides the
order); sums over tensor and context ranks split what one process adds, so these axes are not
emulated; gradients are summed in their own dtype; of shards (FSDP, ZeRO) the gradients are equal to
the bit, their norm is not, since it adds up squares of other pieces.

Legend: S packed tokens, D model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from phalanx.data.batches import MicroBatch, StepBatch
from phalanx.engines.optim import square_sum
from phalanx.engines.row_loss import DropoutKeys, hidden_loss, row_inputs
from phalanx.engines.trainer_model import TrainModel
from phalanx.engines.user_loss import LossFunction
from phalanx.errors import PlanError
from phalanx.layout.stage_split import StageRange
from phalanx.models.decoder import Part
from phalanx.policy import Order, Step

MOST_DATA_RANKS = 2
Gradients = dict[nn.Parameter, Tensor]


def in_order(lists: Sequence[Sequence[Step]], num_stages: int) -> Iterator[Step]:
    """The steps of all ranks one after another: each rank's in its order, and none before what it
    needs from another stage."""
    done: set[Step] = set()
    at = [0] * len(lists)
    while any(place < len(steps) for place, steps in zip(at, lists)):
        before = len(done)
        for rank, steps in enumerate(lists):
            while at[rank] < len(steps) and _is_ready(steps[at[rank]], done, num_stages):
                done.add(steps[at[rank]])
                yield steps[at[rank]]
                at[rank] += 1
        assert len(done) > before, "lists are checked before they are played"


def _is_ready(step: Step, done: set[Step], num_stages: int) -> bool:
    stage, kind, item = step
    if kind == "F":
        return stage == 0 or Step(stage - 1, "F", item) in done
    if kind == "W":
        return Step(stage, "I", item) in done
    if Step(stage, "F", item) not in done:
        return False
    return stage == num_stages - 1 or any(Step(stage + 1, k, item) in done for k in "BI")


class OrderedReference:
    """Computes the gradients of a step of a pp x dp run.

    Args:
        model: whole, of one process.
        order, num_ranks: of the run's pipeline; num_ranks = 1: it has none.
        ranges: of its stages.
        device: of the model.
        loss: of the counted positions of a row, instead of cross-entropy.
    """

    def __init__(
        self,
        model: TrainModel,
        order: Order | None,
        num_ranks: int,
        ranges: Sequence[StageRange],
        device: torch.device,
        loss: LossFunction | None = None,
    ) -> None:
        self._model, self._order, self._device, self._loss = model, order, device, loss
        self._num_ranks = num_ranks
        self._parts = [Part(range(r.start, r.stop), r.embeds, r.ends) for r in ranges]
        stages = len(self._parts)
        self._rank_of_stage = order.rank_of_stage(num_ranks) if order else (0,) * stages
        decoder = model.decoder
        self._trained = [p for p in decoder.parameters() if p.requires_grad]
        is_apart = self._rank_of_stage[0] != self._rank_of_stage[-1]
        self._tied = decoder.head_weight if decoder.config.tied_head and is_apart else None

    def gradients(self, batches: Sequence[StepBatch], dropout: DropoutKeys | None = None) -> Tensor:
        """Leave the step's gradients with the parameters, before clipping.

        Args:
            batches: of each data rank.

        Returns:
            The loss, added up as the run does.

        Raises:
            PlanError: `plan/illegal` for more data ranks than have one order.
        """
        if len(batches) > MOST_DATA_RANKS:
            rule = "the order in which more ranks are summed is not known here"
            legal = [MOST_DATA_RANKS]
            raise PlanError("plan/illegal", "data ranks", len(batches), rule, legal=legal)
        losses, of_rank = [], []
        for batch in batches:
            loss, grads, head_grad = self._data_rank(batch, dropout)
            losses.append(loss)
            of_rank.append((grads, head_grad))
        for parameter in self._trained:
            found = [grads[parameter] for grads, _ in of_rank if parameter in grads]
            parameter.grad = _sum(found) if found else None
        heads = [head for _, head in of_rank if head is not None]
        if heads:
            self._tied.grad = self._tied.grad + _sum(heads)
        return _sum(losses)

    def norm(self) -> Tensor:
        """Global norm of these gradients: squares are added rank by rank."""
        owner: dict[nn.Parameter, int] = {}  # of a tied embedding, who embeds
        for part, rank in zip(self._parts, self._rank_of_stage):
            for parameter in self._of_stage(part):
                owner.setdefault(parameter, rank)
        squares = []
        for rank in range(self._num_ranks):
            grads = [p.grad for p in self._trained if p.grad is not None and owner[p] == rank]
            if grads:
                squares.append(square_sum(grads))
        total = _sum(squares).sqrt()
        is_double = any(p.dtype is torch.float64 for p in self._trained)
        return total if is_double else total.float()

    def _data_rank(
        self, batch: StepBatch, dropout: DropoutKeys | None
    ) -> tuple[Tensor, Gradients, Tensor | None]:
        """Loss and gradients of one data rank; the tied embedding's from the head apart."""
        for parameter in self._trained:
            parameter.grad = None
        rows = batch.micro_batches
        played = _Played(self, batch, dropout)
        lists = self._lists(len(rows))
        for step in in_order(lists, len(self._parts)):
            played.run(step)
        grads = {p: p.grad for p in self._trained if p.grad is not None}
        total = torch.zeros((), dtype=played.losses[0].dtype, device=self._device)
        for item in played.loss_order:
            total = total + played.losses[item]
        return total, grads, played.head_grad

    def _lists(self, num_items: int) -> list[list[Step]]:
        if self._order is not None:
            return self._order.order(self._num_ranks, num_items)
        return [[Step(0, kind, item) for item in range(num_items) for kind in "FB"]]

    def _of_stage(self, part: Part) -> list[nn.Parameter]:
        """The trained parameters that a stage computes with."""
        body, found = self._model.decoder.model, []
        modules: list[nn.Module] = [body.layers[str(at)] for at in part.layers]
        modules += [body.embed_tokens] if part.embeds else []
        modules += [body.norm] if part.ends else []
        for module in modules:
            found += [p for p in module.parameters() if p.requires_grad]
        if part.ends and self._model.decoder.head_weight.requires_grad:
            found.append(self._model.decoder.head_weight)
        return list(dict.fromkeys(found))


class _Played:
    """The passes of one data rank's micro-batches."""

    def __init__(
        self, reference: OrderedReference, batch: StepBatch, dropout: DropoutKeys | None
    ) -> None:
        self._reference, self._batch = reference, batch
        model, device = reference._model, reference._device
        self._inputs = [row_inputs(model, row, device, dropout) for row in batch.micro_batches]
        self._passes: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # input, output
        self._slopes: dict[tuple[int, int], Tensor | None] = {}  # gradient of the output
        self._later: dict[tuple[int, int], list[tuple[nn.Parameter, Tensor]]] = {}
        self.losses: dict[int, Tensor] = {}
        self.loss_order: list[int] = []
        self.head_grad: Tensor | None = None

    def run(self, step: Step) -> None:
        """One pass of one stage."""
        place = (step.stage, step.item)
        if step.kind == "F":
            self._forward(*place)
        elif step.kind == "W":
            self._accumulate(step.stage, self._later.pop(place))
        else:
            self._backward(*place, is_split=step.kind == "I")

    def _forward(self, stage: int, item: int) -> None:
        part = self._reference._parts[stage]
        rows, keywords = self._inputs[item]
        if stage:
            rows = self._passes[stage - 1, item][1].detach().requires_grad_()
        out = self._reference._model.decoder(rows, part=part, **keywords)
        if part.ends:
            out = self._loss_of(out, self._batch.micro_batches[item])
            self.losses[item] = out.detach()
            self.loss_order.append(item)
        self._passes[stage, item] = (rows, out)

    def _loss_of(self, hidden_SD: Tensor, row: MicroBatch) -> Tensor:
        reference = self._reference
        return hidden_loss(
            reference._model,
            hidden_SD,
            row,
            self._batch.num_counted_global,
            reference._device,
            reference._loss,
        )

    def _backward(self, stage: int, item: int, *, is_split: bool) -> None:
        part = self._reference._parts[stage]
        rows, out = self._passes.pop((stage, item))
        if not out.requires_grad:  # nothing is trained up to here
            return
        parameters = self._reference._of_stage(part)
        wanted = [*parameters, rows] if rows.requires_grad else parameters
        slope = self._slopes.pop((stage, item), None)
        found = torch.autograd.grad(out, wanted, slope, allow_unused=True)
        if rows.requires_grad:
            self._slopes[stage - 1, item] = found[-1]
        pairs = [(p, grad) for p, grad in zip(parameters, found) if grad is not None]
        if is_split:
            self._later[stage, item] = pairs
        else:
            self._accumulate(stage, pairs)

    def _accumulate(self, stage: int, pairs: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        ends, tied = self._reference._parts[stage].ends, self._reference._tied
        for parameter, grad in pairs:
            if ends and parameter is tied:
                self.head_grad = grad if self.head_grad is None else self.head_grad + grad
            else:
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad


def _sum(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
