"""Tensor specs applied to a torch module: products become DTensors, blocks exchange activations.

It reads rules, never names of policies:

- "column", "row": an `nn.Linear` whose weight is cut by output or by input (`Rule.dim` 0 or 1);
- "block": the module around them, entered by one exchange and left by one. Without exchanges
  before it, all ranks enter with the whole input and its gradient is summed once, however many
  column products read it; a gather before it and a scatter behind it split the tokens between
  blocks (sequence parallelism);
- "partial": weights that every rank holds whole and whose gradients it has a part of; they are
  summed once a step, after data parallelism has reduced them (`BoundTensor.finish_step`).

Apply it before `bind.bind_data`, which then shards what is left on each rank. Activations are
[tokens, ...]: rows of a packed batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from math import ceil, prod

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from phalanx.errors import PlanError
from phalanx.policy import Rule, Spec

PLACEMENTS = ("column", "row", "block", "partial")
_REDUCTIONS = {("F", "after", "all_reduce"), ("B", "after", "all_reduce")}
_SPLIT_TOKENS = {
    *(("F", "before", "all_gather"), ("F", "after", "reduce_scatter")),
    *(("B", "before", "all_gather"), ("B", "after", "reduce_scatter")),
}


class BoundTensor:
    """A module whose products are split.

    Attributes:
        splits_tokens: each rank enters and leaves with its own part of the tokens, padded to equal
            parts by whoever calls the module.
        partial: (axis, module, parameter name) of each weight with partial gradients.
    """

    def __init__(
        self, mesh: DeviceMesh, splits_tokens: bool, found: Sequence[tuple[str, nn.Module, str]]
    ) -> None:
        self.splits_tokens, self.partial = splits_tokens, tuple(found)
        self._mesh = mesh

    def finish_step(self) -> None:
        """Sum the partial gradients over their axis; once a step, after `BoundData.finish_step`.

        Shards travel padded to equal size, as in all exchanges of what a data axis has cut.
        """
        for axis in dict.fromkeys(axis for axis, _, _ in self.partial):
            grads = [getattr(m, name).grad for of, m, name in self.partial if of == axis]
            shards = [_padded_shard(grad) for grad in grads if grad is not None]
            if not shards:
                continue
            flat = torch.cat([padded for _, padded in shards])
            dist.all_reduce(flat, group=self._mesh.get_group(axis))
            for (shard, _), part in zip(shards, flat.split([len(p) for _, p in shards])):
                shard.copy_(part[: shard.numel()].view_as(shard))


def bind_tensor(
    module: nn.Module,
    specs: Sequence[Spec],
    mesh: DeviceMesh,
    *,
    multiples: Mapping[str, int] | None = None,
) -> BoundTensor:
    """Apply tensor specs to `module`, in place; parameters may still be on the meta device.

    Args:
        module: with equal weights on all ranks, if it has any; each takes its part.
        specs: along different axes.
        mesh: with the specs' axes among its named dims.
        multiples: module pattern -> what a rank's part must be a multiple of (channels per head).

    Raises:
        PlanError: `plan/illegal` for an axis that the mesh lacks, a placement that is no tensor
            placement, exchanges that torch does not carry out, or a product that cannot be cut
            into equal parts.
    """
    found: list[tuple[str, nn.Module, str]] = []
    splits_tokens = False
    for spec in specs:
        where = f"policy.{spec.family}.{spec.policy_name}"
        if spec.axis not in (mesh.mesh_dim_names or ()):
            rule, legal = "the mesh has no such axis", mesh.mesh_dim_names or ()
            raise PlanError("plan/illegal", f"{where}.axis", spec.axis, rule, legal=legal)
        if mesh[spec.axis].size() == 1:
            continue
        splits = _splits_tokens(spec, where)
        splits_tokens |= splits
        styles: dict[str, ParallelStyle] = {}
        for path, each in module.named_modules():
            rule = spec.rule_for(path) if path else None
            if rule is None:
                continue
            if rule.placement == "partial":
                found += [(spec.axis, each, name) for name, _ in each.named_parameters("", False)]
            elif style := _style(rule, splits):
                _require_cuttable(path, each, rule, mesh[spec.axis].size(), multiples or {})
                styles[path] = style
        parallelize_module(module, mesh[spec.axis], styles, src_data_rank=None)
    return BoundTensor(mesh, splits_tokens, found)


def _splits_tokens(spec: Spec, where: str) -> bool:
    """Whether the spec's blocks gather and scatter tokens; it must be one of the two known ways."""
    splits = False
    for rule in spec.rules():
        if rule.placement not in PLACEMENTS:
            text = "is no placement of tensor parallelism"
            raise PlanError("plan/illegal", where, rule.placement, text, legal=PLACEMENTS)
        if rule.placement != "block":
            continue
        exchanges = {(e.phase, e.at, e.collective) for e in rule.exchanges}
        if exchanges not in (_REDUCTIONS, _SPLIT_TOKENS):
            text = "torch reduces after a block, or gathers before it and scatters after it"
            raise PlanError("plan/illegal", f"{where}: {rule.pattern}", sorted(exchanges), text)
        if any(exchange.of == "inputs" for exchange in rule.exchanges):
            text = "torch keeps gathered inputs, so nothing is gathered a second time"
            value, legal = "exchange of inputs", ["gather_twice = false"]
            raise PlanError("plan/illegal", f"{where}: {rule.pattern}", value, text, legal=legal)
        splits = exchanges == _SPLIT_TOKENS
    return splits


def _style(rule: Rule, splits_tokens: bool) -> ParallelStyle | None:
    if rule.placement == "column":
        return ColwiseParallel()
    if rule.placement == "row":
        return RowwiseParallel(output_layouts=Shard(0) if splits_tokens else Replicate())
    return _BlockInput(splits_tokens)


class _BlockInput(ParallelStyle):
    """The block's first argument is exchanged once, for all column products that read it."""

    def __init__(self, splits_tokens: bool) -> None:
        super().__init__()
        self._splits_tokens = splits_tokens

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(_enter, device_mesh, self._splits_tokens))
        return module


def _enter(mesh: DeviceMesh, splits_tokens: bool, _module: nn.Module, args: tuple) -> tuple:
    x, *others = args
    placement = Shard(0) if splits_tokens else Replicate()
    entered = DTensor.from_local(x, mesh, [placement], run_check=False)
    if splits_tokens:
        entered = entered.redistribute(placements=[Replicate()])
    return (entered, *others)


def _require_cuttable(
    path: str, module: nn.Module, rule: Rule, degree: int, multiples: Mapping[str, int]
) -> None:
    if rule.placement == "block":
        return
    if not isinstance(module, nn.Linear) or any(True for _ in module.children()):
        text = "only a plain nn.Linear, without adapters, is cut"
        raise PlanError("plan/illegal", path, type(module).__name__, text)
    size = module.weight.shape[rule.dim]
    multiple = next((n for pattern, n in multiples.items() if fnmatchcase(path, pattern)), 1)
    if size % (degree * multiple):
        unit = f"parts of a multiple of {multiple}" if multiple > 1 else "equal parts"
        text = f"dim {rule.dim} of its weight cannot be cut into {degree} {unit}"
        legal = [n for n in range(1, degree) if size % (n * multiple) == 0][-1:]
        raise PlanError("plan/illegal", path, size, text, legal=[f"degree {n}" for n in legal])


def _padded_shard(grad: Tensor) -> tuple[Tensor, Tensor]:
    """What this rank holds of a gradient, and the same flat, as long as the longest shard."""
    if not isinstance(grad, DTensor):
        return grad, grad.flatten()
    shard, num_shards = grad.to_local(), 1
    for size, placement in zip(grad.device_mesh.shape, grad.placements):
        num_shards *= size if placement.is_shard() else 1
    longest = ceil(grad.shape[0] / num_shards) * prod(grad.shape[1:])
    return shard, F.pad(shard.flatten(), (0, longest - shard.numel()))
