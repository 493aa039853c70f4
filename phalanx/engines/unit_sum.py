"""Gradients of a unit summed over replicas, while the backward pass of other units goes on.

A unit is due when each of its parameters has got all the gradients of the step. They are counted,
not announced: in a pipeline the last backward passes of two stages come at different times, and a
weight that two stages of a rank share gets two gradients per micro-batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.engines.local_parts import local_of, placed_as
from phalanx.engines.memory import make_room
from phalanx.errors import WorldError


class UnitGradients(ABC):
    """Counts the gradients of a unit's parameters and acts when they are complete.

    Args:
        parameters: asked at the first step, as leaving the meta device replaces them.
        dtype: of the sum over ranks, and of the sum over micro-batches where it is wider than the
            gradients; None: that of the gradients.
        every_round: act after each round of the step instead of once; a unit with a weight that two
            stages share always acts once, as the rounds of two stages overlap.
    """

    def __init__(
        self,
        parameters: Callable[[], Sequence[nn.Parameter]],
        dtype: torch.dtype | None,
        *,
        every_round: bool = False,
    ) -> None:
        self._ask = parameters
        self._dtype, self._every_round = dtype, every_round
        self.parameters: Sequence[nn.Parameter] | None = None
        self._uses: Mapping[nn.Parameter, int] = {}
        self._rounds: list[int] = []  # micro-batches of each round still to come
        self._left: dict[Tensor, int] = {}  # gradients still to come in this round
        self._num_open = 0
        self._is_summed = False  # more than one gradient of a parameter is added up
        self._wide: dict[Tensor, Tensor] = {}  # sums in a wider dtype than the gradients'

    def ask(self) -> None:
        """Learn the parameters, once they have left the meta device."""
        if self.parameters is None:
            self.parameters = list(self._ask())
            for parameter in self.parameters:
                parameter.register_post_accumulate_grad_hook(self.note)

    def begin_step(
        self, num_items: int, uses: Mapping[nn.Parameter, int], round_items: int = 1
    ) -> None:
        """A step of `num_items` micro-batches comes next.

        Args:
            uses: gradients that a parameter gets per micro-batch, where they are not 1.
            round_items: micro-batches of a round.
        """
        self.ask()
        self._uses, self._wide = uses, {}
        self._rounds = [num_items]
        if self._every_round and all(uses.get(each, 1) == 1 for each in self.parameters):
            whole, rest = divmod(num_items, round_items)
            self._rounds = [round_items] * whole + [rest] * bool(rest)
        self._begin_round()

    def _begin_round(self) -> None:
        num_items = self._rounds.pop(0)
        self._left = {each: num_items * self._uses.get(each, 1) for each in self.parameters}
        self._num_open = len(self._left)
        self._is_summed = any(count > 1 for count in self._left.values())

    def note(self, parameter: Tensor) -> None:
        """One more gradient of a parameter has been added up; without a step it does not count."""
        left = self._left.get(parameter)
        if left is None:
            return
        assert left > 0, "a gradient more than the step was said to have"
        if self._is_summed and self._is_narrow(parameter):
            self._widen(parameter)
        self._left[parameter] = left - 1
        if left == 1:
            self._num_open -= 1
            if not self._num_open:
                self._start()
                if self._rounds:
                    self._begin_round()

    def finish(self) -> None:
        """The step is over: wait until what was started is done.

        Raises:
            WorldError: `train/callback` for parameters that got fewer gradients than there were
                micro-batches. Which ones may differ from rank to rank, so nothing can be sent for
                them that would not meet another unit's sum.
        """
        if self._num_open:
            shapes = [tuple(each.shape) for each, left in self._left.items() if left]
            rule = "of trained weights got no gradient in some micro-batch; a loss must use them"
            legal = ["plan.data = fsdp, which sums what there is"]
            raise WorldError("train/callback", "train.loss", shapes, rule, legal=legal)
        if self._left:
            self._left = {}
            self._end()

    def grad_bytes(self) -> int:
        """Bytes of the gradients that this rank keeps of the unit now."""
        grads = [each.grad for each in self.parameters or () if each.grad is not None]
        return sum(local_of(each).nbytes for each in (*grads, *self._wide.values()))

    def _make_room(self, num_bytes: int, device: torch.device) -> None:
        """Before gradients are copied into one buffer of so many bytes; on the CPU."""
        if device.type == "cpu":
            make_room(num_bytes)

    @abstractmethod
    def _start(self) -> None:
        """All gradients of a round are there."""

    @abstractmethod
    def _end(self) -> None:
        """Wait for what `_start` began; gradients end where the optimizer looks for them."""

    def _is_narrow(self, parameter: Tensor) -> bool:
        return self._dtype is not None and self._dtype.itemsize > parameter.dtype.itemsize

    @torch.no_grad()
    def _widen(self, parameter: Tensor) -> None:
        """Add a gradient to the sum in the wider dtype."""
        grad = local_of(parameter.grad)
        if parameter in self._wide:
            self._wide[parameter].add_(grad)
        else:
            self._wide[parameter] = grad.to(self._dtype)
        parameter.grad = None

    def take_grad(self, parameter: nn.Parameter) -> Tensor:
        """What this rank has of a parameter's gradient, which is forgotten."""
        grad = self._wide.pop(parameter, None)
        if grad is None:
            grad, parameter.grad = local_of(parameter.grad), None
        return grad if self._dtype is None else grad.to(self._dtype)


class UnitSum(UnitGradients):
    """One all-reduce per step for the gradients of a unit, started when the last is complete.

    Args:
        parameters, dtype: see `UnitGradients`.
        group: the replicas.
    """

    def __init__(
        self,
        parameters: Callable[[], Sequence[nn.Parameter]],
        group: dist.ProcessGroup,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(parameters, dtype)
        self._group = group
        self._flat: Tensor | None = None
        self._work: dist.Work | None = None

    def _start(self) -> None:
        parts = [local_of(parameter) for parameter in self.parameters]
        sizes = [part.numel() for part in parts]
        dtype = self._dtype or reduce(torch.promote_types, (part.dtype for part in parts))
        self._make_room(sum(sizes) * dtype.itemsize, parts[0].device)
        self._flat = torch.empty(sum(sizes), dtype=dtype, device=parts[0].device)
        for parameter, part in zip(self.parameters, self._flat.split(sizes)):
            part.copy_(self.take_grad(parameter).flatten())  # which is gone then
        self._work = dist.all_reduce(self._flat, group=self._group, async_op=True)

    def _end(self) -> None:
        self._work.wait()
        sizes = [local_of(parameter).numel() for parameter in self.parameters]
        for parameter, part in zip(self.parameters, self._flat.split(sizes)):
            grad = part.view_as(local_of(parameter)).to(parameter.dtype)
            parameter.grad = placed_as(parameter, grad)
        self._work, self._flat = None, None
