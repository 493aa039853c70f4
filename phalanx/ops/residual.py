"""Real tensors for a toy step: the ops of what `lower` makes of `workload.toy_work`.

    step = ResidualStep(work, mesh, order, specs, num_counted=num_tokens_of_all_replicas)
    world = LocalWorld(mesh, step.ops, dtype=torch.float64)
    for rank, context in world.contexts.items():
        step.place(context, parameters, batches[rank])
    drive(world, program=lower(work, mesh, order, specs))

A block is y = x + down(gelu(up(x))); the loss is half the squared distance to a target, over the
counted tokens, divided by their number in the whole global batch.

Legend: S tokens of one micro-batch, D model, F feed-forward (this rank's columns where a spec cuts
them). Handles: see `phalanx.lower`; this module adds "target:<item>" and "counted:<item>" (the
rows that count) on the last stage, "loss:<item>", and "saved:<block>.<item>".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.action import Compute
from phalanx.lower.chunk import Placed
from phalanx.mesh import Mesh
from phalanx.ops.flat_unit import FlatUnit
from phalanx.ops.tensor_cut import TensorCut
from phalanx.policy import Order, Spec
from phalanx.workload import StepWork, split_units
from phalanx.worlds.torch_tensors import RankContext


def residual_forward(x_SD: Tensor, up_FD: Tensor, down_DF: Tensor) -> tuple[Tensor, Tensor]:
    """The block without its residual, [S, D], and what gelu got, [S, F]."""
    z_SF = F.linear(x_SD, up_FD)
    return F.linear(F.gelu(z_SF), down_DF), z_SF


def residual_backward(
    grad_SD: Tensor, x_SD: Tensor, z_SF: Tensor, up_FD: Tensor, down_DF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the block without its residual: of x, up and down."""
    grad_z_SF = torch.ops.aten.gelu_backward(grad_SD @ down_DF, z_SF)
    return grad_z_SF @ up_FD, grad_z_SF.T @ x_SD, grad_SD.T @ F.gelu(z_SF)


class Batch(NamedTuple):
    """One micro-batch of one data-parallel replica."""

    x_SD: Tensor
    target_SD: Tensor
    counted_S: Tensor  # bool


class _Place(NamedTuple):
    """Where a block stands."""

    unit: str
    stage: int
    opens: bool  # its forward op is the first of its stage
    closes: bool  # its forward op is the last of its stage
    parameters: tuple[str, str]  # up, down


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv 1711.05101, algorithm 2.

    Padding has neither weight nor gradient, so it stays zero.
    """

    learning_rate: float = 1e-2
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def apply(self, weight: Tensor, grad: Tensor, state: Tensor, step: int) -> None:
        """One step in place; `state` is [2, n]: the first and the second moment."""
        state[0].lerp_(grad, 1 - self.beta1)
        state[1].lerp_(grad * grad, 1 - self.beta2)
        mean = state[0] / (1 - self.beta1**step)
        root = (state[1] / (1 - self.beta2**step)).sqrt_() + self.eps
        weight.mul_(1 - self.learning_rate * self.weight_decay)
        weight.sub_(mean / root, alpha=self.learning_rate)


class ResidualStep:
    """What every rank computes, under any Order and any data and tensor specs.

    Args:
        work: from `toy_work`.
        mesh, order, specs: as given to `lower`.
        num_counted: counted tokens of the global batch, over all replicas and micro-batches.
        pipeline_axis: as given to `lower`.

    Attributes:
        ops: name -> callable(context, action), for a world.
    """

    def __init__(
        self,
        work: StepWork,
        mesh: Mesh,
        order: Order,
        specs: Sequence[Spec] = (),
        *,
        num_counted: int,
        pipeline_axis: str = "pp",
        adamw: AdamW | None = None,
    ) -> None:
        self.work, self.mesh, self.pipeline_axis = work, mesh, pipeline_axis
        self.num_counted, self.adamw = num_counted, adamw or AdamW()
        num_ranks = mesh.degree(pipeline_axis)
        self._stages = split_units(work.units, order.num_stages(num_ranks))
        self._rank_of_stage = order.rank_of_stage(num_ranks)
        self._placed = Placed.of(work, self._stages, mesh, specs)
        self._cut = TensorCut.of(work, mesh, specs)
        self._splits_tokens = self._placed.token_parts > 1
        self._shard_axis = _shard_axis(mesh, specs)
        self._places = self._find_places()
        self._flat = {unit.name: self._flat_unit(unit.name) for unit in work.units}
        self.ops = {"mlp.F": self.forward, "mlp.B": self.backward, "optimizer": self.optimize}

    def _find_places(self) -> dict[str, _Place]:
        places = {}
        for stage, units in enumerate(self._stages):
            blocks = [(unit.name, block) for unit in units for block in unit.blocks]
            for at, (unit, block) in enumerate(blocks):
                up, down = (f"{block.name}.{module.name}" for module in block.modules)
                ends = (at == 0, at == len(blocks) - 1)
                places[block.name] = _Place(unit, stage, *ends, (up, down))
        return places

    def _flat_unit(self, unit: str) -> FlatUnit:
        blocks = self._placed.unit_of[unit].blocks
        names = [f"{block.name}.{module.name}" for block in blocks for module in block.modules]
        shapes = dict(zip(names, self._placed.shapes[unit], strict=True))
        return FlatUnit(shapes, self.mesh.degree(self._shard_axis))

    # ---- before and after the program ------------------------------------------------------------

    def units_of(self, rank: int) -> list[str]:
        """Units that a rank computes."""
        at = self.mesh.coordinate(rank, self.pipeline_axis)
        held = [s for s, holder in enumerate(self._rank_of_stage) if holder == at]
        return [unit.name for stage in held for unit in self._stages[stage]]

    def place(
        self, context: RankContext, parameters: Mapping[str, Tensor], batches: Sequence[Batch]
    ) -> None:
        """Give a rank its shards of whole canonical parameters and its replica's micro-batches."""
        for unit in self.units_of(context.rank):
            flat = self._flat[unit]
            parts = {n: self._cut.part(parameters[n], n, context.rank) for n in flat.shapes}
            shard = flat.part(flat.pack(parts), context.coordinate(self._shard_axis))
            context.tensors[f"{unit}/shard"] = shard.to(context.device, copy=True)
        for item, batch in enumerate(batches):
            x_SD, target_SD, counted_S = (self._padded(t.to(context.device)) for t in batch)
            rows = self._own_rows(context, len(batch.x_SD)) if self._splits_tokens else slice(None)
            context.tensors[f"act:-1.{item}"] = x_SD[rows].clone()
            context.tensors[f"target:{item}"] = target_SD
            context.tensors[f"counted:{item}"] = counted_S

    def whole(
        self, tensors: Mapping[int, Mapping[str, Tensor]], suffix: str, replica: int = 0
    ) -> dict[str, Tensor]:
        """Canonical tensors put together from "<unit>/<suffix>" of all ranks of a replica.

        Args:
            tensors: rank -> its tensors by handle.
            suffix: "shard" or, once reduced, "grad".
            replica: coordinate on the axis "replicate".
        """
        found = {}
        axes = [self._cut.axis, self._shard_axis]
        for unit, flat in self._flat.items():
            first = next(
                rank
                for rank in range(self.mesh.size)
                if unit in self.units_of(rank)
                and self.mesh.coordinate(rank, "replicate") == replica
            )
            ranks = iter(self.mesh.group(first, axes))
            parts = []
            for _ in range(self.mesh.degree(self._cut.axis)):
                shards = [tensors[next(ranks)][f"{unit}/{suffix}"] for _ in range(flat.num_shards)]
                parts.append(flat.unpack(torch.cat(shards)))
            for name in flat.shapes:
                found[name] = self._cut.join([part[name] for part in parts], name)
        return found

    # ---- ops -------------------------------------------------------------------------------------

    def forward(self, context: RankContext, action: Compute) -> None:
        """Forward of one block; its output lacks the other ranks' parts of the sum."""
        place, item = self._places[action.layer], action.item
        leaving = f"act:{place.stage}.{item}"
        enters = place.opens and not self._splits_tokens  # a gather has renamed it already
        x_SD = self._rows(context.get(f"act:{place.stage - 1}.{item}" if enters else leaving))
        y_SD, z_SF = residual_forward(x_SD, *self._weights(context, place))
        own = self._own_rows(context, action.num_tokens)
        y_SD[own] += x_SD[own]
        kept_SD = x_SD[own].clone() if self._cut.gathers_input_twice else x_SD
        context.tensors[f"input:{action.layer}.{item}"] = kept_SD
        context.tensors[f"saved:{action.layer}.{item}"] = z_SF
        context.tensors[leaving] = y_SD

    def backward(self, context: RankContext, action: Compute) -> None:
        """Backward of one block; gradients of its weights join those of earlier micro-batches."""
        place, item = self._places[action.layer], action.item
        grad_SD = self._entering_gradient(context, place, item)
        x_SD = context.tensors.pop(f"input:{action.layer}.{item}")
        if self._cut.gathers_input_twice:
            x_SD = self._rows(context.tensors.pop(f"input:{action.layer}.{item}/whole"))
        z_SF = context.tensors.pop(f"saved:{action.layer}.{item}")
        grad_x_SD, *grads = residual_backward(grad_SD, x_SD, z_SF, *self._weights(context, place))
        own = self._own_rows(context, action.num_tokens)
        grad_x_SD[own] += grad_SD[own]
        context.tensors[f"grad:{place.stage}.{item}"] = grad_x_SD
        self._accumulate(context, place, grads)

    def optimize(self, context: RankContext, action: Compute) -> None:
        """AdamW on this rank's shards; the gradients are used up."""
        for unit in self.units_of(context.rank):
            weight = context.get(f"{unit}/shard")
            grad = context.tensors.pop(f"{unit}/grad")
            step = context.tensors.setdefault(f"{unit}/step", torch.zeros((), dtype=torch.int64))
            state = context.tensors.setdefault(f"{unit}/adamw", weight.new_zeros(2, len(weight)))
            step += 1
            self.adamw.apply(weight, grad, state, int(step))

    # ---- inside ----------------------------------------------------------------------------------

    def _rows(self, tensor: Tensor) -> Tensor:
        """As rows: what arrived for the first time is flat."""
        return tensor.view(-1, self.work.units[0].blocks[0].modules[0].shape[1])

    def _padded(self, rows: Tensor) -> Tensor:
        """Rows up to a multiple of the parts that tokens are split into."""
        missing = -len(rows) % self._placed.token_parts
        return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])

    def _own_rows(self, context: RankContext, num_tokens: int) -> slice:
        """The rows that this rank adds the residual to, and holds where tokens are split."""
        size = ceil(num_tokens / self.mesh.degree(self._cut.axis))
        start = size * context.coordinate(self._cut.axis)
        return slice(start, start + size)

    def _weights(self, context: RankContext, place: _Place) -> tuple[Tensor, Tensor]:
        flat = self._flat[place.unit]
        held = "full" if flat.num_shards > 1 else "shard"
        up, down = place.parameters
        parameters = flat.unpack(context.get(f"{place.unit}/{held}"))
        return parameters[up], parameters[down]

    def _entering_gradient(self, context: RankContext, place: _Place, item: int) -> Tensor:
        own = f"grad:{place.stage}.{item}"
        is_last = place.closes and place.stage == len(self._stages) - 1
        if not is_last:
            enters = place.closes and not self._splits_tokens
            return self._rows(context.get(f"grad:{place.stage + 1}.{item}" if enters else own))
        # the output, from which the backward pass starts; a gather has put it under my own name
        y_SD = self._rows(context.get(own if self._splits_tokens else f"act:{place.stage}.{item}"))
        counted_S1 = context.get(f"counted:{item}")[:, None]
        grad_SD = (y_SD - context.get(f"target:{item}")) * counted_S1 / self.num_counted
        context.tensors[f"loss:{item}"] = 0.5 * self.num_counted * (grad_SD * grad_SD).sum()
        return grad_SD

    def _accumulate(self, context: RankContext, place: _Place, grads: Sequence[Tensor]) -> None:
        flat, handle = self._flat[place.unit], f"{place.unit}/grad"
        total = context.tensors.get(handle)
        if total is None or len(total) < flat.size:
            reduced, total = total, grads[0].new_zeros(flat.size)
            if reduced is not None:  # an earlier micro-batch's: sums are linear
                flat.part(total, context.coordinate(self._shard_axis)).add_(reduced)
            context.tensors[handle] = total
        found = {name: grads[0].new_zeros(shape) for name, shape in flat.shapes.items()}
        found |= zip(place.parameters, grads)
        total += flat.pack(found)


def _shard_axis(mesh: Mesh, specs: Sequence[Spec]) -> str:
    found = [s.axis for s in specs if any(r.placement == "shard" for r in s.rules())]
    return found[0] if found else "shard"
