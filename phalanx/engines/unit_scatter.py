"""Gradients of a unit summed onto the ranks that update its rows, and updated weights gathered.

Weights stay whole on every rank. Of each parameter a rank updates the rows that `torch.chunk` along
dim 0 gives it: its gradient, moments and, where they are kept in another dtype, master weights are
a shard, held by a DTensor that takes the parameter's place in the optimizer.

Legend: F ranks of the axis, C elements of a rank's padded shards of all parameters of the unit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import ceil, prod

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from phalanx.engines.joint_axes import side_by_side
from phalanx.engines.local_parts import local_of, placed_as, rows_placement
from phalanx.engines.unit_sum import UnitGradients

MOST_UNDER_WAY = 2


class UnitScatter(UnitGradients):
    """One reduce-scatter for the gradients of a unit once they are complete.

    Args:
        parameters: see `UnitGradients`.
        mesh: one-dimensional: the ranks that share the update between them.
        replicas: over which shards are summed afterwards; None: there are none.
        dtype: of the reduction, and in which shards of several reductions are added up; None: that
            of the gradients.
        master: dtype of what is updated; None: the parameters'. Where it is theirs, the shards are
            rows of the parameters themselves.
        every_round: reduce after each round of the step and keep a shard only, instead of whole
            gradients until the last.
        under_way: units whose reduction has been started, common to all of a module; at most
            `MOST_UNDER_WAY` wait at a time, as each keeps the whole gradients that it sends.
    """

    def __init__(
        self,
        parameters: Callable[[], Sequence[nn.Parameter]],
        mesh: DeviceMesh,
        replicas: dist.ProcessGroup | None,
        *,
        dtype: torch.dtype | None,
        master: torch.dtype | None,
        every_round: bool,
        under_way: deque[UnitScatter],
    ) -> None:
        super().__init__(parameters, dtype, every_round=every_round)
        self._under_way = under_way
        self.shards: dict[Tensor, nn.Parameter] = {}
        self._mesh, self._group = mesh, mesh.get_group()
        self._replicas, self._master = replicas, master
        self._sum: Tensor | None = None  # of the rounds so far, [C]
        self._work: dist.Work | None = None
        self._sent_FC: Tensor | None = None  # kept until it is sent
        self._received_C: Tensor | None = None

    def hold(self) -> None:
        """Cut what this rank updates from the values that the parameters have now."""
        self.ask()
        self.shards = {each: self._shard_of(each) for each in self.parameters}

    # ---- gradients -------------------------------------------------------------------------------

    def _start(self) -> None:
        if self in self._under_way:
            self._add_received()
        while len(self._under_way) >= MOST_UNDER_WAY:
            self._under_way[0]._add_received()
        grads = [self.take_grad(each) for each in self.parameters]
        self._make_room(sum(each.nbytes for each in grads), grads[0].device)
        self._sent_FC = _packed(grads, self._degree)
        del grads  # copied
        self._under_way.append(self)
        if self._degree == 1:
            self._received_C = self._sent_FC[0]
            return
        self._received_C = self._sent_FC.new_empty(self._sent_FC.shape[1])
        self._work = dist.reduce_scatter_tensor(
            self._received_C, self._sent_FC.view(-1), group=self._group, async_op=True
        )

    def _end(self) -> None:
        self._add_received()
        total_C, self._sum = self._sum, None
        if self._replicas is not None:
            dist.all_reduce(total_C, group=self._replicas)
        if not self.shards:
            self.hold()
        sizes = [_padded_rows(each, self._degree)[1] for each in self.parameters]
        for parameter, part in zip(self.parameters, total_C.split(sizes)):
            shard = self.shards[parameter]
            rows = part[: shard.to_local().numel()].view_as(shard.to_local())
            shard.grad = placed_as(shard, rows.to(shard.dtype))

    def _add_received(self) -> None:
        if self not in self._under_way:
            return
        self._under_way.remove(self)
        if self._work is not None:
            self._work.wait()
        self._sum = self._received_C if self._sum is None else self._sum.add_(self._received_C)
        self._work = self._sent_FC = self._received_C = None

    def grad_bytes(self) -> int:
        """Bytes of the sums that are kept between micro-batches, what is under way left out."""
        return super().grad_bytes() + (0 if self._sum is None else self._sum.nbytes)

    # ---- weights ---------------------------------------------------------------------------------

    @torch.no_grad()
    def start_gather(self) -> Callable[[], None]:
        """Send the rows that this rank has updated; call the result to have the others' too."""
        locals_ = [local_of(each) for each in self.parameters]
        rows = [self.shards[each].to_local().to(each.dtype) for each in self.parameters]
        if self._degree == 1:
            torch._foreach_copy_(locals_, rows)
            return lambda: None
        sizes = [_padded_rows(each, self._degree)[1] for each in self.parameters]
        sent_C = torch.cat([_extended(each.flatten(), size) for each, size in zip(rows, sizes)])
        received_FC = sent_C.new_empty(self._degree, len(sent_C))
        work = dist.all_gather_into_tensor(
            received_FC.view(-1), sent_C, group=self._group, async_op=True
        )

        def finish() -> None:
            work.wait()
            for whole, part_FC in zip(locals_, received_FC.split(sizes, dim=1)):
                whole.copy_(part_FC.reshape(-1)[: whole.numel()].view_as(whole))

        return finish

    # ---- shards ----------------------------------------------------------------------------------

    @property
    def _degree(self) -> int:
        return self._mesh.size()

    def _shard_of(self, parameter: nn.Parameter) -> nn.Parameter:
        whole = local_of(parameter)
        num_rows, _ = _padded_rows(parameter, self._degree)
        first = min(self._mesh.get_local_rank() * num_rows, len(whole))
        rows = whole[first : first + num_rows]
        if self._master not in (None, whole.dtype):
            rows = rows.to(self._master)
        mesh, placements = self._placement(parameter)
        held = DTensor.from_local(
            rows,
            mesh,
            placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return nn.Parameter(held)

    def _placement(self, parameter: nn.Parameter) -> tuple[DeviceMesh, list[Placement]]:
        """As FSDP2 places a shard, also beside a model axis that has cut the same dim before."""
        if not isinstance(parameter, DTensor):
            return self._mesh, [Shard(0)]
        mesh, placements = parameter.device_mesh, parameter.placements
        before = [
            mesh.size(at)
            for at, placed in enumerate(placements)
            if not placed.is_replicate() and placed.dim == 0
        ]
        cut = rows_placement(before[0] if before else 1)
        return side_by_side([self._mesh, mesh]), [cut, *placements]


def _padded_rows(parameter: Tensor, degree: int) -> tuple[int, int]:
    """Rows of a parameter's longest shard, and their elements."""
    whole = local_of(parameter)
    num_rows = ceil(len(whole) / degree)
    return num_rows, num_rows * prod(whole.shape[1:])


def _extended(flat: Tensor, size: int) -> Tensor:
    return flat if len(flat) == size else F.pad(flat, (0, size - len(flat)))


def _packed(grads: Sequence[Tensor], degree: int) -> Tensor:
    """[F, C]: for each rank its shards of all gradients, padded to equal length."""
    parts = []
    for grad in grads:
        size = _padded_rows(grad, degree)[1]
        parts.append(_extended(grad.flatten(), degree * size).view(degree, size))
    return torch.cat(parts, dim=1)
