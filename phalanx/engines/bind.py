"""Data-parallel specs applied to a torch module: the one binder of the placements shard, replicate.

It reads rules, never names of policies. "shard" becomes `fully_shard`; "replicate" beside it makes
the mesh two-dimensional (HSDP); "replicate" alone sums gradients unit by unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from phalanx.engines.unit_sum import UnitSum
from phalanx.errors import PlanError
from phalanx.policy import Rule, Spec

PLACEMENTS = ("shard", "replicate")


@dataclass(frozen=True)
class BoundUnit:
    """Modules that are gathered and reduced together.

    Attributes:
        name: canonical, "" for the root, which holds what no other unit claims; the pattern of
            their rule for modules that it takes out of other units.
        modules: one, or those taken out.
        shard, replicate: the rules that apply to it, by placement.
        is_frozen: no parameter that it claims is trained.
    """

    name: str
    modules: tuple[nn.Module, ...]
    shard: Rule | None
    replicate: Rule | None
    is_frozen: bool = False

    @property
    def module(self) -> nn.Module:
        """Where torch keeps the state of the unit."""
        return self.modules[0]

    @property
    def stays_gathered(self) -> bool:
        """Nothing in it ever changes, and it is not given back after its forward pass anyway."""
        return self.shard is not None and not self.shard.reshard and self.is_frozen


class BoundData:
    """A module whose gradients end summed over all data ranks, on the shards that a rank holds.

    Per micro-batch: `begin_item`, forward, backward; after the last one `finish_step`.

    Attributes:
        units: the root first, then in module order.
        groups: process group of each data axis.
    """

    def __init__(
        self,
        units: Sequence[BoundUnit],
        groups: Sequence[dist.ProcessGroup],
        sums: Sequence[UnitSum],
    ) -> None:
        self.units, self.groups = tuple(units), tuple(groups)
        self._sums = sums
        self._sharded = [unit for unit in units if unit.shard is not None]

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks."""
        return prod(group.size() for group in self.groups)

    @property
    def rank(self) -> int:
        """Mine among the data-parallel ranks, the last axis fastest."""
        index = 0
        for group in self.groups:
            index = index * group.size() + group.rank()
        return index

    def sum(self, value: Tensor) -> Tensor:
        """`value` summed over all data-parallel ranks, in place."""
        for group in self.groups:
            dist.all_reduce(value, group=group)
        return value

    def begin_item(self, index: int, num_items: int) -> None:
        """Micro-batch `index` of `num_items` comes next: decide what its backward exchanges."""
        is_last = index == num_items - 1
        for unit in self._sharded:
            always = any(e.of == "grads" and e.when == "always" for e in unit.shard.exchanges)
            unit.module.set_requires_gradient_sync(is_last or always, recurse=False)
            gives_back = unit.shard.reshard or (is_last and not unit.stays_gathered)
            unit.module.set_reshard_after_backward(gives_back, recurse=False)
        for each in self._sums:
            each.begin_item(is_last)

    def finish_step(self) -> None:
        """Wait until all gradients are summed."""
        for each in self._sums:
            each.finish()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep units gathered between forward passes, for many small ones without gradients."""
        for unit in self._sharded:
            unit.module.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for unit in self._sharded:
                unit.module.set_reshard_after_forward(unit.shard.reshard, recurse=False)
                if unit.shard.reshard:
                    unit.module.reshard()


def bind_data(
    module: nn.Module,
    specs: Sequence[Spec],
    mesh: DeviceMesh,
    *,
    param_dtype: str = "",
    reduce_dtype: str = "",
) -> BoundData:
    """Apply data specs to `module`, in place; parameters may still be on the meta device.

    Args:
        specs: at most one with placement "shard" and one with "replicate".
        mesh: with the specs' axes among its named dims.
        param_dtype, reduce_dtype: of gathered parameters and of reductions where a rule names none.

    Raises:
        PlanError: `plan/illegal` for an axis that the mesh lacks, a placement that is no data
            placement, or one that comes twice.
    """
    by_placement = _by_placement(specs, mesh)
    shard, replicate = (by_placement.get(name) for name in PLACEMENTS)
    units = _units(
        module, shard, replicate, {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
    )
    sums: Sequence[UnitSum] = ()
    if shard is not None:
        _shard_units(units, shard, replicate, mesh)
    elif replicate is not None:
        sums = [_unit_sum(units, unit, mesh.get_group(replicate.axis)) for unit in units]
    axes = [axis for axis in mesh.mesh_dim_names if axis in {s.axis for s in specs}]
    return BoundData(units, [mesh.get_group(axis) for axis in axes], sums)


def _by_placement(specs: Sequence[Spec], mesh: DeviceMesh) -> dict[str, Spec]:
    found: dict[str, Spec] = {}
    for spec in specs:
        placement = spec.rules()[-1].placement
        where = f"policy.{spec.family}.{spec.policy_name}"
        if placement not in PLACEMENTS or any(r.placement != placement for r in spec.rules()):
            rule = "is no placement of data parallelism"
            raise PlanError("plan/illegal", where, placement, rule, legal=PLACEMENTS)
        if placement in found:
            raise PlanError("plan/illegal", where, placement, "only one policy may place so")
        if spec.axis not in (mesh.mesh_dim_names or ()):
            rule, legal = "the mesh has no such axis", mesh.mesh_dim_names or ()
            raise PlanError("plan/illegal", f"{where}.axis", spec.axis, rule, legal=legal)
        found[placement] = spec
    return found


_Rules = tuple[Rule | None, Rule | None]


def _units(
    root: nn.Module, shard: Spec | None, replicate: Spec | None, dtypes: dict[str, str]
) -> list[BoundUnit]:
    """The root; the outermost modules whose rules are others than the root's; and inside those, by
    rule, the modules whose rules are others again."""

    def rules_for(path: str) -> _Rules:
        return _with_dtypes(shard, path, dtypes), _with_dtypes(replicate, path, dtypes)

    outside = rules_for("")
    units = [BoundUnit("", (root,), *outside)]
    taken: dict[_Rules, list[nn.Module]] = {}
    unit_path = taken_path = None
    for path, module in root.named_modules():
        rules = rules_for(path)
        if not path or rules == outside or _is_below(path, taken_path):
            continue
        if not _is_below(path, unit_path):
            units.append(BoundUnit(path, (module,), *rules))
            unit_path = path
        elif rules != (units[-1].shard, units[-1].replicate):
            taken.setdefault(rules, []).append(module)
            taken_path = path
    units += [BoundUnit(_pattern(rules), tuple(found), *rules) for rules, found in taken.items()]
    return [replace(each, is_frozen=not _claimed(units, each)) for each in units]


def _is_below(path: str, above: str | None) -> bool:
    return above is not None and path.startswith(f"{above}.")


def _pattern(rules: _Rules) -> str:
    return next(rule.pattern for rule in rules if rule is not None)


def _with_dtypes(spec: Spec | None, path: str, dtypes: dict[str, str]) -> Rule | None:
    rule = None if spec is None else spec.rule_for(path)
    missing = {name: dtype for name, dtype in dtypes.items() if rule and not getattr(rule, name)}
    return replace(rule, **missing) if missing else rule


def _claimed(units: Sequence[BoundUnit], unit: BoundUnit) -> list[nn.Parameter]:
    """The trainable parameters of a unit, without those that a unit inside it claims."""
    inside = {module for each in units for module in each.modules if each is not unit}
    inside.difference_update(_surrounding(units, unit))
    theirs = {parameter for module in inside for parameter in module.parameters()}
    mine = (parameter for module in unit.modules for parameter in module.parameters())
    return [parameter for parameter in mine if parameter.requires_grad and parameter not in theirs]


def _surrounding(units: Sequence[BoundUnit], unit: BoundUnit) -> set[nn.Module]:
    """Modules of other units that contain this one."""
    modules = (module for each in units for module in each.modules)
    return {module for module in modules if unit.modules[0] in set(module.modules())}


def _unit_sum(units: Sequence[BoundUnit], unit: BoundUnit, group: dist.ProcessGroup) -> UnitSum:
    dtype = _dtype(unit.replicate.reduce_dtype)
    return UnitSum(lambda: _claimed(units, unit), group, dtype)


def _shard_units(
    units: Sequence[BoundUnit], shard: Spec, replicate: Spec | None, mesh: DeviceMesh
) -> None:
    axes = [spec.axis for spec in (replicate, shard) if spec is not None]
    grid = _grid(mesh, axes)
    is_cut = any(isinstance(each, DTensor) for each in units[0].module.parameters())
    if is_cut and grid.mesh_dim_names != tuple(a for a in mesh.mesh_dim_names if a in axes):
        rule = f"beside a tensor axis {axes[0]} must come before {axes[1]}: torch joins no others"
        raise PlanError("plan/illegal", "plan.mesh", list(mesh.mesh_dim_names), rule, legal=[axes])
    for unit in reversed(units):  # innermost first: the root claims the rest
        fully_shard(
            list(unit.modules) if len(unit.modules) > 1 else unit.module,
            mesh=grid,
            reshard_after_forward=unit.shard.reshard,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=_dtype(unit.shard.param_dtype),
                reduce_dtype=_dtype(unit.shard.reduce_dtype),
                cast_forward_inputs=False,
            ),
        )
    modules: list[FSDPModule] = [unit.module for unit in units if len(unit.modules) == 1]
    for at, unit in enumerate(units):
        # the loss is divided by the global number of targets: gradients add up to their mean
        unit.module.set_gradient_divide_factor(1.0)
        unit.module.set_force_sum_reduction_for_comms(True)
        if len(unit.modules) > 1:
            _gather_with_root(units[0].module, unit.module)
            continue
        ahead = unit.shard.prefetch
        unit.module.set_modules_to_forward_prefetch(modules[at + 1 : at + 1 + ahead])
        if ahead > 1:
            behind = modules[max(1, at - ahead) : at]
            unit.module.set_modules_to_backward_prefetch(behind[::-1])


def _gather_with_root(root: nn.Module, unit: FSDPModule) -> None:
    """Modules that others look into never run by themselves, so no hook of theirs gathers them."""

    def gather(_root: nn.Module, _inputs: object) -> None:
        unit.unshard()

    root.register_forward_pre_hook(gather)


def _grid(mesh: DeviceMesh, axes: Sequence[str]) -> DeviceMesh:
    """The part of the mesh along `axes`, in this order: fully_shard wants replicas first."""
    ascending = tuple(axis for axis in mesh.mesh_dim_names if axis in axes)
    grid = mesh[ascending]
    if ascending == tuple(axes):
        return grid
    groups = [grid.get_group(axis) for axis in axes]
    ranks = grid.mesh.t().contiguous()
    return DeviceMesh.from_group(groups, grid.device_type, ranks, mesh_dim_names=tuple(axes))


def _dtype(name: str) -> torch.dtype | None:
    return getattr(torch, name) if name else None
