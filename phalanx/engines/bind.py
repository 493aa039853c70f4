"""Data-parallel specs applied to a torch module: the binder of placements shard, update, replicate.

It reads rules, never names of policies. "shard" becomes `fully_shard`; "replicate" beside it makes
the mesh two-dimensional (HSDP); "replicate" alone sums gradients unit by unit; "update" leaves
weights whole and cuts what updates them: gradients, moments, master weights. Ranks that split the
tokens of a row between them hold the same parameters: to gradients and shards they are one axis
with the data ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from phalanx.engines.fsdp_buffers import make_room_for_reductions
from phalanx.engines.joint_axes import joint_mesh, side_by_side
from phalanx.engines.unit_scatter import UnitScatter
from phalanx.engines.unit_sum import UnitGradients, UnitSum
from phalanx.engines.units import BoundUnit, claimed, units_of
from phalanx.planner.data_axes import (
    PLACEMENTS,
    require_cast,
    require_order,
    specs_by_placement,
)
from phalanx.policy import Spec


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
                see `lower.data.round_items`.
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

    def grad_bytes(self) -> int:
        """Bytes of the gradients that this rank keeps between micro-batches, shards of
        `fully_shard` and what is just being sent left out."""
        return sum(each.grad_bytes() for each in self._sums)

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
    apart: Sequence[nn.Module] = (),
    param_dtype: str = "",
    reduce_dtype: str = "",
    master_dtype: str = "",
) -> BoundData:
    """Apply data specs to `module`, in place; parameters may still be on the meta device.

    Args:
        specs: at most one of each placement, and not both "shard" and "update".
        mesh: with the specs' axes among its named dims.
        context: axes whose ranks compute different tokens of the same rows.
        apart: modules whose gradients come at other times than those of the rest of their unit, as
            where a rank holds both ends of a pipeline.
        param_dtype, reduce_dtype: of gathered parameters and of reductions where a rule names none.
        master_dtype: of what an update changes where weights stay whole; "": the weights' own.

    Raises:
        PlanError: `plan/illegal` for an axis that the mesh lacks, a placement that is no data
            placement, or one that comes twice.
    """
    by_placement = specs_by_placement(specs, mesh.mesh_dim_names or ())
    shard, update, replicate = placed = tuple(by_placement.get(name) for name in PLACEMENTS)
    dtypes = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
    units = units_of(module, placed, dtypes)
    sums: Sequence[UnitGradients] = ()
    if shard is not None:
        is_cut = any(isinstance(each, DTensor) for each in module.parameters())
        require_order(mesh.mesh_dim_names, specs, is_cut=is_cut)
        _shard_units(units, _grid(mesh, shard, replicate, context))
    elif update is not None:
        cut = joint_mesh(mesh, [update.axis, *context])
        replicas = None if replicate is None else mesh.get_group(replicate.axis)
        master, under_way = _dtype(master_dtype), deque()
        sums = [
            _unit_scatter(each, part, cut, replicas, master, under_way)
            for each in units
            for part in _parts(units, each, apart)
        ]
    elif replicate is not None or context:
        axes = [] if replicate is None else [replicate.axis]
        group = joint_mesh(mesh, [*axes, *context]).get_group()
        sums = [_unit_sum(units, unit, group) for unit in units]
    axes = [axis for axis in mesh.mesh_dim_names if axis in {s.axis for s in specs}]
    groups, split = ([mesh.get_group(axis) for axis in names] for names in (axes, context))
    return BoundData(units, groups, sums, split)


def stored_dtype(specs: Sequence[Spec], master: str, compute: str) -> str:
    """The dtype of a module's own parameters where weights are updated in `master`.

    Sharding casts what it gathers, so shards are kept in `master`; where only the update is cut,
    the module computes with its own parameters and master copies are apart.

    Raises:
        PlanError: `plan/illegal` where the dtypes differ and no spec casts.
    """
    if master == compute:
        return master
    require_cast(specs, master, compute)
    shards = any(spec.rules()[-1].placement == "shard" for spec in specs)
    return master if shards else compute


def _unit_sum(
    units: Sequence[BoundUnit], unit: BoundUnit, group: dist.ProcessGroup
) -> UnitGradients:
    dtype = _dtype(unit.replicate.reduce_dtype) if unit.replicate else None
    return UnitSum(lambda: claimed(units, unit), group, dtype)


def _parts(
    units: Sequence[BoundUnit], unit: BoundUnit, apart: Sequence[nn.Module]
) -> list[Callable[[], list[nn.Parameter]]]:
    """What asks for the parameters of a unit that get their gradients together."""

    def asks(is_apart: bool) -> Callable[[], list[nn.Parameter]]:
        def ask() -> list[nn.Parameter]:
            theirs = {parameter for module in apart for parameter in module.parameters()}
            return [each for each in claimed(units, unit) if (each in theirs) == is_apart]

        return ask

    return [asks(False), asks(True)] if apart else [asks(False)]


def _unit_scatter(
    unit: BoundUnit,
    parameters: Callable[[], Sequence[nn.Parameter]],
    mesh: DeviceMesh,
    replicas: dist.ProcessGroup | None,
    master: torch.dtype | None,
    under_way: deque[UnitScatter],
) -> UnitGradients:
    return UnitScatter(
        parameters,
        mesh,
        replicas,
        dtype=_dtype(unit.update.reduce_dtype),
        master=master,
        every_round=any(e.of == "grads" and e.when == "round" for e in unit.update.exchanges),
        under_way=under_way,
    )


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
        if grid.device_type == "cpu":
            make_room_for_reductions(unit.module)
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
