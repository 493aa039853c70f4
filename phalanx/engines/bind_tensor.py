"""Tensor specs applied to a torch module: weights are cut, blocks exchange activations.

It reads rules, never names of policies:

- "column", "row": an `nn.Linear`, with or without an adapter, whose weight is cut by output or by
  input (`Rule.dim` 0 or 1);
- "vocab": an embedding or a head that is cut by token;
- "block": the module around products, entered by one exchange and left by one. Without exchanges
  before it, all ranks enter with the whole input and its gradient is summed once, however many
  column products read it; a gather before it and a scatter behind it split the tokens between
  blocks (sequence parallelism), where what was gathered is kept for the backward pass, or gathered
  again there;
- "partial": weights that every rank holds whole and whose gradients it has a part of; they are
  summed once a step, after data parallelism has reduced them (`BoundTensor.finish_step`).

An adapter W + B A follows its product: by column B is cut and A whole, by row A is cut and B whole;
gradients of the whole factor are partial. The low-rank update of a row product is part of what the
block's exchange sums anyway, so adapters exchange nothing of their own in a forward pass.

Apply it before `bind.bind_data`, which then shards what is left on each rank. Parameters that are
cut become DTensors; products are computed on what they hold, without DTensor's dispatch.
Activations are [tokens, ...]: rows of a packed batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil, prod

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from phalanx.engines.overlapped import Started, enter_started, wait_behind
from phalanx.engines.remade import remaking
from phalanx.engines.tensor_products import CutProduct
from phalanx.errors import PlanError
from phalanx.ops.tensor_exchange import enter, gather_tokens, gathered, leave, scatter_tokens
from phalanx.ops.vocabulary import VocabularyPart
from phalanx.policy import Rule, Spec

PLACEMENTS = ("column", "row", "vocab", "block", "partial")
_REDUCTIONS = {("F", "after", "all_reduce"), ("B", "after", "all_reduce")}
_SPLIT_TOKENS = {
    *(("F", "before", "all_gather"), ("F", "after", "reduce_scatter")),
    *(("B", "before", "all_gather"), ("B", "after", "reduce_scatter")),
}


class BoundTensor:
    """A module whose products are split.

    Attributes:
        axis: the mesh axis, "" where nothing is split.
        group: its ranks; None where nothing is split.
        splits_tokens: each rank enters and leaves with its own part of the tokens, padded to equal
            parts by the caller.
        vocabularies: name of an embedding or a head that is cut -> this rank's tokens.
        partial: (module, parameter name) of weights with partial gradients.
    """

    def __init__(self, axis: str, group: dist.ProcessGroup | None, splits_tokens: bool) -> None:
        self.axis, self.group, self.splits_tokens = axis, group, splits_tokens
        self.vocabularies: dict[str, VocabularyPart] = {}
        self.partial: list[tuple[nn.Module, str]] = []

    @property
    def degree(self) -> int:
        """Ranks that share the products."""
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        """Mine among them."""
        return 0 if self.group is None else self.group.rank()

    def enter(self, x: Tensor) -> Tensor:
        """A block's input, whole on every rank."""
        return gather_tokens(x, self.group) if self.splits_tokens else enter(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """A block's output, the sum over ranks: whole, or this rank's tokens."""
        return scatter_tokens(x, self.group) if self.splits_tokens else leave(x, self.group)

    @contextmanager
    def whole_tokens(self) -> Iterator[None]:
        """Split no tokens for a while, as when single ones are computed without gradient."""
        before, self.splits_tokens = self.splits_tokens, False
        try:
            yield
        finally:
            self.splits_tokens = before

    def finish_step(
        self, held: Callable[[nn.Parameter], nn.Parameter] = lambda parameter: parameter
    ) -> None:
        """Sum the partial gradients; once a step, after `BoundData.finish_step`.

        Shards travel padded to equal size, as in all exchanges of what a data axis has cut.

        Args:
            held: of a parameter the one that has its gradient, `BoundData.held`.
        """
        grads = [held(getattr(module, name)).grad for module, name in self.partial]
        shards = [_padded_shard(grad) for grad in grads if grad is not None]
        if not shards:
            return
        flat = torch.cat([padded for _, padded in shards])
        dist.all_reduce(flat, group=self.group)
        for (shard, _), part in zip(shards, flat.split([len(padded) for _, padded in shards])):
            shard.copy_(part[: shard.numel()].view_as(shard))


def bind_tensor(
    module: nn.Module,
    specs: Sequence[Spec],
    mesh: DeviceMesh,
    *,
    head_rows: Mapping[str, Sequence[int]] | None = None,
) -> BoundTensor:
    """Apply a tensor spec to `module`, in place; parameters may still be on the meta device.

    Args:
        module: with equal weights on all ranks, if it has any; each takes its part.
        specs: at most one along an axis with more than one rank.
        mesh: with the specs' axes among its named dims.
        head_rows: module name -> rows of its weight that this rank computes, for column products
            that are shared by head rather than cut (more ranks than key and value heads).

    Raises:
        PlanError: `plan/illegal` for an axis that the mesh lacks, two specs, a placement that is no
            tensor placement, exchanges that are not carried out, or a product that cannot be cut.
    """
    spec = _only(specs, mesh)
    if spec is None:
        return BoundTensor("", None, False)
    where = f"policy.{spec.family}.{spec.policy_name}"
    bound = BoundTensor(spec.axis, mesh.get_group(spec.axis), _splits_tokens(spec, where))
    done = ""
    for path, each in list(module.named_modules()):
        rule = spec.rule_for(path) if path else None
        if rule is None or (done and path.startswith(done)):
            continue
        if rule.placement == "block":
            each.forward = _Block(bound, each, rule)
        elif rule.placement == "partial":
            bound.partial += [(each, name) for name, _ in each.named_parameters("", False)]
        elif rule.placement == "vocab":
            _cut_vocabulary(bound, path, each, mesh[spec.axis])
        else:
            _cut_product(bound, path, each, rule, mesh[spec.axis], (head_rows or {}).get(path))
            done = f"{path}."
    return bound


def _only(specs: Sequence[Spec], mesh: DeviceMesh) -> Spec | None:
    """The spec that splits anything."""
    found = []
    for spec in specs:
        where = f"policy.{spec.family}.{spec.policy_name}"
        if spec.axis not in (mesh.mesh_dim_names or ()):
            rule, legal = "the mesh has no such axis", mesh.mesh_dim_names or ()
            raise PlanError("plan/illegal", f"{where}.axis", spec.axis, rule, legal=legal)
        found += [spec] if mesh[spec.axis].size() > 1 else []
    if len(found) > 1:
        axes = "+".join(spec.axis for spec in found)
        raise PlanError("plan/illegal", "plan.tensor", axes, "products are split over one axis")
    return found[0] if found else None


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
            text = "a block is reduced after, or gathers before and scatters after"
            raise PlanError("plan/illegal", f"{where}: {rule.pattern}", sorted(exchanges), text)
        splits = exchanges == _SPLIT_TOKENS
    return splits


class _Block:
    """The forward pass of a module around products.

    Its first argument is exchanged once, for all column products that read it.
    """

    def __init__(self, bound: BoundTensor, module: nn.Module, rule: Rule) -> None:
        self._bound, self._module, self._forward = bound, module, module.forward
        self._overlaps = rule.overlap
        # what was gathered is not kept, but gathered again by the backward pass
        self._gathers_again = any(exchange.of == "inputs" for exchange in rule.exchanges)

    def __call__(self, x: Tensor, *others, **keywords) -> Tensor:
        bound = self._bound
        if not (self._gathers_again and bound.splits_tokens):
            return self._forward(self._enter(x), *others, **keywords)
        with remaking() as remade:
            whole = self._enter(x)
            if remade is not None:
                remade.note(whole, gathered, x, bound.group)
            return self._forward(whole, *others, **keywords)

    def _enter(self, x: Tensor) -> Tensor:
        bound = self._bound
        is_training = torch.is_grad_enabled() and x.requires_grad
        deferred = self._deferrable() if self._overlaps and is_training else []
        if not deferred:
            return bound.enter(x)
        started = Started(bound.group, bound.splits_tokens)
        x = wait_behind(x, started)
        for each in deferred:
            each.defer()
        return enter_started(x, started)

    def _deferrable(self) -> list[CutProduct]:
        forwards = (getattr(each, "forward", None) for each in self._module.modules())
        return [each for each in forwards if isinstance(each, CutProduct) and each.can_defer]


def _cut_product(
    bound: BoundTensor,
    path: str,
    module: nn.Module,
    rule: Rule,
    mesh: DeviceMesh,
    rows: Sequence[int] | None,
) -> None:
    _require_cuttable(path, module, rule, mesh.size(), rows)
    adapted = hasattr(module, "lora_A")
    if rows is not None:
        whole = ["lora_A", "lora_B"] if adapted else []
        bound.partial += [(module, "weight")]
    else:
        whole = (["lora_A"] if rule.placement == "column" else ["lora_B"]) if adapted else []
        _distribute(module, "weight", mesh, rule.dim)
        if adapted and rule.placement == "column":
            _distribute(module.lora_B, "weight", mesh, 0)
        elif adapted:
            _distribute(module.lora_A, "weight", mesh, 1)
    bound.partial += [(getattr(module, name), "weight") for name in whole]
    first = bound.rank * (module.in_features // bound.degree) if rule.placement == "row" else 0
    leaves = bound.leave if rule.placement == "row" else None
    module.forward = CutProduct(module, rows, first, leaves)


def _cut_vocabulary(bound: BoundTensor, path: str, module: nn.Module, mesh: DeviceMesh) -> None:
    part = VocabularyPart(bound.group, module.weight.shape[0])
    if min(part.sizes) < 1:
        text = f"tokens leave one of {mesh.size()} ranks without any"
        raise PlanError("plan/illegal", path, part.num_tokens, text)
    bound.vocabularies[path] = part
    _distribute(module, "weight", mesh, 0)
    if isinstance(module, nn.Embedding):
        module.forward = lambda tokens_S: bound.leave(
            part.embed(tokens_S, module.weight.to_local())
        )
    else:
        module.forward = lambda rows_ND: part.logits(rows_ND, module.weight.to_local())


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, dim: int) -> None:
    whole = getattr(module, name)
    cut = distribute_tensor(whole.detach(), mesh, [Shard(dim)], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(cut, requires_grad=whole.requires_grad))


def _require_cuttable(
    path: str, module: nn.Module, rule: Rule, degree: int, rows: Sequence[int] | None
) -> None:
    if not isinstance(module, nn.Linear) or module.bias is not None:
        text = "only an nn.Linear without bias is cut"
        raise PlanError("plan/illegal", path, type(module).__name__, text)
    size = module.weight.shape[rule.dim]
    if rows is None and size % degree:
        text = f"dim {rule.dim} of its weight cannot be cut into {degree} equal parts"
        legal = [n for n in range(1, degree) if size % n == 0][-1:]
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
