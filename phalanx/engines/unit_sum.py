"""Gradients of a unit summed over replicas, while the backward pass of other units goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


class UnitSum:
    """One all-reduce per step for the gradients of a unit, started when the last is complete.

    Args:
        parameters: asked at the first micro-batch, as leaving the meta device replaces them.
        group: the replicas.
        dtype: of the sum; None: that of the gradients.
    """

    def __init__(
        self,
        parameters: Callable[[], Sequence[nn.Parameter]],
        group: dist.ProcessGroup,
        dtype: torch.dtype | None,
    ) -> None:
        self._ask, self._group, self._dtype = parameters, group, dtype
        self._parameters: Sequence[nn.Parameter] | None = None
        self._is_last = False
        self._num_ready = 0
        self._flat: Tensor | None = None
        self._work: dist.Work | None = None

    def begin_item(self, is_last: bool) -> None:
        """A micro-batch comes next; the backward pass of the last one starts the sum."""
        self._is_last = is_last
        if self._parameters is None:
            self._parameters = self._ask()
            for parameter in self._parameters:
                parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, _parameter: Tensor) -> None:
        if not self._is_last:
            return
        self._num_ready += 1
        if self._num_ready == len(self._parameters):
            grads = self._grads()
            self._flat = torch.cat([g.flatten() for g in grads]).to(self._dtype or grads[0].dtype)
            self._work = dist.all_reduce(self._flat, group=self._group, async_op=True)

    def finish(self) -> None:
        """Wait, and write the sums back."""
        assert self._num_ready == len(self._parameters or ()), "a gradient was not computed"
        if self._work is None:
            return
        self._work.wait()
        grads = self._grads()
        for grad, part in zip(grads, self._flat.split([grad.numel() for grad in grads])):
            grad.copy_(part.view_as(grad))
        self._work, self._flat, self._num_ready = None, None, 0

    def _grads(self) -> list[Tensor]:
        """Of each parameter what this rank holds, where a model axis has cut it."""
        grads = [parameter.grad for parameter in self._parameters]
        return [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
