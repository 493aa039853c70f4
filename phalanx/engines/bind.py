"""Data-parallel specs applied to a torch module: the binder of placements shard, update, replicate.

It reads rules, never names of policies. "shard" becomes `fully_shard`; "replicate" beside it makes
the mesh two-dimensional (HSDP); "replicate" alone sums gradients unit by unit; "update" leaves
weights whole and cuts what updates them: gradients, moments, master weights. Ranks that split the
tokens of a row between them hold the same parameters: to gradients and shards they are one axis
with the data ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from phalanx.engines.joint_axes import joint_mesh, side_by_side
from phalanx.engines.unit_scatter import UnitScatter
from phalanx.engines.unit_sum import UnitGradients, UnitSum
from phalanx.errors import PlanError
from phalanx.policy import Rule, Spec

PLACEMENTS = ("shard", "update", "replicate")


@dataclass(frozen=True)
class BoundUnit:
    """Modules that are gathered and reduced together.

    Attributes:
        name: canonical, "" for the root, which holds what no other unit claims; the pattern of
            their rule for modules that it takes out of other units.
        modules: one, or those taken out.
        shard, update, replicate: the rules that apply to it, by placement.
        is_frozen: no parameter that it claims is trained.
    """

    name: str
    modules: tuple[nn.Module, ...]
    shard: Rule | None
    update: Rule | None
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

    Per micro-batch: `begin_item`, forward, backward; after the last one `finish_step`. A pipeline,
    whose stages pass micro-batches at different times, calls `begin_step` once instead.

    Attributes:
        units: the root first, then in module order.
        groups: process group of each data axis, whose ranks compute different rows.
        context: process groups of ranks that compute different tokens of the same rows.
    """

    def __init__(
        self,
        units: Sequence[BoundUnit],
        groups: Sequence[dist.ProcessGroup],
        sums: Sequence[UnitGradients],
        context: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self.units, self.groups, self.context = tuple(units), tuple(groups), tuple(context)
        self._sums = sums
        self._cut = [each for each in sums if isinstance(each, UnitScatter)]
        self._sum_of: dict[Tensor, UnitGradients] = {}
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
        """`value` summed over all ranks that compute other rows or tokens, in place."""
        for group in (*self.groups, *self.context):
            dist.all_reduce(value, group=group)
        return value

    def begin_step(
        self,
        num_items: int,
        uses: Mapping[nn.Parameter, int] | None = None,
        round_items: int = 1,
    ) -> None:
        """A step of `num_items` micro-batches comes next, in whatever order they are computed.

        Args:
            uses: gradients that a parameter gets per micro-batch, where they are not 1: a weight
                that two stages of this rank share gets 2.
            round_items: micro-batches that a stage takes in a row before another one has its turn;
                rules that reduce always do so after each round.
        """
        for each in self._sums:
            each.begin_step(num_items, uses or {}, round_items)
        self._sum_of = {p: each for each in self._sums for p in each.parameters}

    def note(self, parameters: Iterable[nn.Parameter]) -> None:
        """Each has got one more gradient without autograd's hooks, as when torch's pipelining
        computes the gradients of weights apart from those of inputs."""
        for parameter in parameters:
            if parameter in self._sum_of:
                self._sum_of[parameter].note(parameter)

    def begin_item(self, index: int, num_items: int) -> None:
        """Micro-batch `index` of `num_items` comes next: decide what its backward exchanges."""
        if index == 0:
            self.begin_step(num_items)
        is_last = index == num_items - 1
        for unit in self._sharded:
            always = any(e.of == "grads" and e.when == "always" for e in unit.shard.exchanges)
            unit.module.set_requires_gradient_sync(is_last or always, recurse=False)
            gives_back = unit.shard.reshard or (is_last and not unit.stays_gathered)
            unit.module.set_reshard_after_backward(gives_back, recurse=False)

    def finish_step(self) -> None:
        """Wait until all gradients are summed."""
        for each in self._sums:
            each.finish()

    def held(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter whose gradient `finish_step` leaves summed, on what this rank updates.

        It is another one where only the update is cut: a DTensor with this rank's rows, which share
        memory with those of the whole or are its master copy; the whole keeps no gradient.
        """
        for each in self._cut:
            if parameter in each.shards:
                return each.shards[parameter]
        return parameter

    def named_held(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Each parameter as an optimizer shall see it; ask when the module has its values."""
        for each in self._cut:
            if not each.shards:
                each.hold()
        return ((name, self.held(parameter)) for name, parameter in named_parameters)

    def finish_update(self) -> None:
        """What this rank holds has changed: let all ranks compute with it. All call it, after an
        update and after values were loaded into what an optimizer sees."""
        finish: Callable[[], None] | None = None
        for each in self._cut:
            following = each.start_gather() if each.parameters else None
            if finish is not None:
                finish()
            finish = following
        if finish is not None:
            finish()

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
    context: Sequence[str] = (),
    param_dtype: str = "",
    reduce_dtype: str = "",
    master_dtype: str = "",
) -> BoundData:
    """Apply data specs to `module`, in place; parameters may still be on the meta device.

    Args:
        specs: at most one of each placement, and not both "shard" and "update".
        mesh: with the specs' axes among its named dims.
        context: axes whose ranks compute different tokens of the same rows.
        param_dtype, reduce_dtype: of gathered parameters and of reductions where a rule names none.
        master_dtype: of what an update changes where weights stay whole; "": the weights' own.

    Raises:
        PlanError: `plan/illegal` for an axis that the mesh lacks, a placement that is no data
            placement, or one that comes twice.
    """
    by_placement = _by_placement(specs, mesh)
    shard, update, replicate = placed = tuple(by_placement.get(name) for name in PLACEMENTS)
    dtypes = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
    units = _units(module, placed, dtypes)
    sums: Sequence[UnitGradients] = ()
    if shard is not None:
        _require_order(units, mesh, replicate, shard)
        _shard_units(units, _grid(mesh, shard, replicate, context))
    elif update is not None:
        cut = joint_mesh(mesh, [update.axis, *context])
        replicas = None if replicate is None else mesh.get_group(replicate.axis)
        sums = [_unit_scatter(units, unit, cut, replicas, _dtype(master_dtype)) for unit in units]
    elif replicate is not None or context:
        axes = [] if replicate is None else [replicate.axis]
        group = joint_mesh(mesh, [*axes, *context]).get_group()
        sums = [_unit_sum(units, unit, group) for unit in units]
    axes = [axis for axis in mesh.mesh_dim_names if axis in {s.axis for s in specs}]
    groups, split = ([mesh.get_group(axis) for axis in names] for names in (axes, context))
    return BoundData(units, groups, sums, split)


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
    if "shard" in found and "update" in found:
        names = [spec.policy_name for spec in specs]
        rule, legal = "both cut the optimizer's state", [found["shard"].policy_name]
        raise PlanError("plan/illegal", "plan.data", names, rule, legal=legal)
    return found


_Rules = tuple[Rule | None, ...]  # one per placement


def _units(
    root: nn.Module, specs: Sequence[Spec | None], dtypes: dict[str, str]
) -> list[BoundUnit]:
    """The root; the outermost modules whose rules are others than the root's; and inside those, by
    rule, the modules whose rules are others again."""

    def rules_for(path: str) -> _Rules:
        return tuple(_with_dtypes(spec, path, dtypes) for spec in specs)

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
        elif rules != (units[-1].shard, units[-1].update, units[-1].replicate):
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


def _unit_sum(
    units: Sequence[BoundUnit], unit: BoundUnit, group: dist.ProcessGroup
) -> UnitGradients:
    dtype = _dtype(unit.replicate.reduce_dtype) if unit.replicate else None
    return UnitSum(lambda: _claimed(units, unit), group, dtype)


def _unit_scatter(
    units: Sequence[BoundUnit],
    unit: BoundUnit,
    mesh: DeviceMesh,
    replicas: dist.ProcessGroup | None,
    master: torch.dtype | None,
) -> UnitGradients:
    return UnitScatter(
        lambda: _claimed(units, unit),
        mesh,
        replicas,
        dtype=_dtype(unit.update.reduce_dtype),
        master=master,
        every_round=any(e.of == "grads" and e.when == "always" for e in unit.update.exchanges),
    )


def _require_order(
    units: Sequence[BoundUnit], mesh: DeviceMesh, replicate: Spec | None, shard: Spec
) -> None:
    names = list(mesh.mesh_dim_names)
    is_cut = any(isinstance(each, DTensor) for each in units[0].module.parameters())
    if is_cut and replicate and names.index(replicate.axis) > names.index(shard.axis):
        axes = [replicate.axis, shard.axis]
        rule = f"beside a tensor axis {axes[0]} must come before {axes[1]}: torch joins no others"
        raise PlanError("plan/illegal", "plan.mesh", names, rule, legal=[axes])


def _shard_units(units: Sequence[BoundUnit], grid: DeviceMesh) -> None:
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


def _grid(
    mesh: DeviceMesh, shard: Spec, replicate: Spec | None, context: Sequence[str]
) -> DeviceMesh:
    """The part of the mesh that cuts parameters: fully_shard wants replicas first."""
    cut = joint_mesh(mesh, [shard.axis, *context])
    return cut if replicate is None else side_by_side([mesh[replicate.axis], cut])


def _dtype(name: str) -> torch.dtype | None:
    return getattr(torch, name) if name else None
