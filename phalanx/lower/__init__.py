"""From decisions to actions: the passes that turn an Order and Specs into a Program.

    order -> context -> tensor -> data -> transport (-> partial gradients -> optimizer)

Each pass lives in one file and walks the chunks of one list, a chunk being one `Step` of the order
with everything that belongs to it. It is the way torch lowers UNSHARD, REDUCE_GRAD and SEND from a
compute-only schedule, with durations, bytes and lanes added. Ranks differ in their list only by
their coordinate on the pipeline axis; all other axes are symmetric, so lowering 4,096 ranks costs
what lowering one pipeline costs.

Labels: compute "1F0" (grain stage), "1F0/layers.2" (unit), "1F0/layers.2.mlp" (operator); an
activation exchange "<compute>@tp"; "gather:<unit>:F0" and "reduce:<unit>:0"; transfers as torch
writes them, "0SEND_F3" and "1RECV_F3".

A rank of a context axis has its part of the tokens of each micro-batch (a balanced layout is taken
for granted: equal work), and parameters see the axis as one more data axis.

Handles: "act:<stage>.<item>" leaves a stage forward ("act:-1.<item>" is the batch),
"grad:<stage>.<item>" leaves it backward; "input:<block>.<item>" is what a block keeps of its input
where it is gathered a second time, into ".../whole". "<unit>/shard", "<unit>/full" are parameters;
"<unit>/grad" is the gradient, whole until its reduction and this rank's shard after it.

What the exchanges ask of ops: an exchange after a block carries the block's whole output, so the
ops add the residual to exactly one rank's part; the backward op of the model's last block makes the
loss's gradient from the output. With `when="always"` the next backward op of a unit finds the shard
that was reduced before and adds it to its own part of the new gradient: sums are linear, so one
handle is enough, and that op waits for the reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from math import ceil, prod
from typing import Any, cast

from phalanx.action import Action, Compute, Program
from phalanx.check_order import check_order
from phalanx.errors import PlanError
from phalanx.lower.activations import exchange_activations
from phalanx.lower.chunk import Chunk, Placed
from phalanx.lower.data import CUTTING_PLACEMENTS, exchange_parameters, gather_updated
from phalanx.lower.order import GRAINS, expand_steps
from phalanx.lower.partial import sum_partial_gradients
from phalanx.lower.transport import add_transfers, wait_for_own_outputs
from phalanx.mesh import Mesh
from phalanx.policy import Order, Spec
from phalanx.workload import StepWork, Unit, split_units

__all__ = ["Chunk", "lower"]

# The order of the passes, by the family that a Spec belongs to (its package).
_ACTIVATION_FAMILIES = ("context", "expert", "tensor")
_PARAMETER_FAMILIES = ("data",)


def lower(
    work: StepWork,
    mesh: Mesh,
    order: Order,
    specs: Sequence[Spec] = (),
    *,
    pipeline_axis: str = "pp",
    grain: str = "operator",
    extra_layers: tuple[float, float] = (0.0, 0.0),
    stages: Sequence[Sequence[str]] | None = None,
) -> Program:
    """One training step as actions.

    Args:
        work: units, micro-batches and element sizes.
        mesh: the devices; an axis that it lacks counts as one of size 1.
        order: the pipeline schedule, also when there is one stage only.
        specs: what wraps the modules, of any Spec families; several of one family compose in the
            order given (shard, then replicate).
        grain: size of one compute: "operator" (block), "unit" or "stage". At grain "stage" nothing
            inside a stage is visible, so no spec may be given.
        extra_layers: see `workload.split_units`.
        stages: names of the units of each stage, in model order; None: split by `split_units`.

    Returns:
        A program whose lists are shared by all ranks of one pipeline coordinate. Its notes hold,
        per list, the elements that a rank keeps ("local_params") and trains ("local_trainable").

    Raises:
        PlanError: `order/illegal` from the order or for too few units, `plan/illegal` for a spec
            on an axis that the mesh lacks or at grain "stage".
        CheckError: `order/missing`, `order/doubled` or `check/deadlock`, with the grid marked.
    """
    _require_legal(mesh, specs, grain)
    num_ranks = mesh.degree(pipeline_axis)
    num_stages = order.num_stages(num_ranks)
    rank_of_stage = order.rank_of_stage(num_ranks)
    if stages is None:
        cut: Sequence[Sequence[Unit]] = split_units(work.units, num_stages, extra_layers)
    else:
        cut = _as_named(work.units, stages, num_stages)
    work = _of_one_rank(work, mesh, specs)
    placed = Placed.of(work, cut, mesh, specs)
    data_specs = _beside_context(_of_families(specs, _PARAMETER_FAMILIES), mesh, specs)
    ordered = order.order(num_ranks, work.num_items)
    check_order(ordered, num_stages, work.num_items, rank_of_stage)
    lists = []
    for steps in ordered:
        chunks = expand_steps(steps, placed, grain)
        for spec in _of_families(specs, _ACTIVATION_FAMILIES):
            exchange_activations(chunks, placed, spec)
        for spec in data_specs:
            exchange_parameters(chunks, placed, spec)
        wait_for_own_outputs(chunks, num_stages - 1)
        lists.append(chunks)
    add_transfers(lists, placed, rank_of_stage, pipeline_axis)
    model_specs = _of_families(specs, _ACTIVATION_FAMILIES)
    programs = [_finish(chunks, placed, model_specs, data_specs) for chunks in lists]
    held = [{unit for chunk in chunks for unit in chunk.units} for chunks in lists]
    notes = {
        "local_params": tuple(sum(map(placed.local_params, units)) for units in held),
        "local_trainable": tuple(sum(map(placed.local_trainable, units)) for units in held),
    }
    return replace(Program.by_axis(mesh, pipeline_axis, programs), notes=notes)


def _of_families(specs: Sequence[Spec], families: Sequence[str]) -> list[Spec]:
    chosen = [spec for spec in specs if spec.family in families]
    return sorted(chosen, key=lambda spec: families.index(spec.family))  # stable: keeps the order


def _of_one_rank(work: StepWork, mesh: Mesh, specs: Sequence[Spec]) -> StepWork:
    """The same units on the tokens that a rank has of each micro-batch."""
    parts = prod(mesh.degree(spec.axis) for spec in specs if spec.family == "context")
    return replace(work, item_tokens=tuple(ceil(count / parts) for count in work.item_tokens))


def _as_named(
    units: Sequence[Unit], stages: Sequence[Sequence[str]], num_stages: int
) -> list[list[Unit]]:
    """The units of each stage.

    Raises:
        PlanError: `plan/illegal` for stages that are not the order's, or not the units in order.
    """
    names = [unit.name for unit in units]
    if len(stages) != num_stages:
        rule = "must be as many as the order runs"
        raise PlanError("plan/illegal", "stages", len(stages), rule, legal=[num_stages])
    if [name for stage in stages for name in stage] != names:
        rule = "must name every unit of the model once, in model order"
        raise PlanError("plan/illegal", "stages", [list(stage) for stage in stages], rule)
    unit_of = dict(zip(names, units))
    return [[unit_of[name] for name in stage] for stage in stages]


def _beside_context(data: Sequence[Spec], mesh: Mesh, specs: Sequence[Spec]) -> list[Spec]:
    """Data specs with the axes along which ranks hold the same parameters: those that split a row's
    tokens join the axis that cuts parameters or updates, or else the one that sums."""
    axes = [spec.axis for spec in specs if spec.family == "context"]
    if not axes or not data:
        return list(data)
    cutting = [spec for spec in data if spec.rules()[-1].placement in CUTTING_PLACEMENTS]
    joins = (cutting or list(data))[0]
    joint = cast(Any, joins)  # a dataclass, as all policies are
    joined = replace(joint, axis=mesh.joint([joins.axis, *axes]))
    return [joined if spec is joins else spec for spec in data]


def _require_legal(mesh: Mesh, specs: Sequence[Spec], grain: str) -> None:
    if grain not in GRAINS:
        raise PlanError("plan/illegal", "grain", repr(grain), "no such grain", legal=GRAINS)
    if specs and grain == "stage":
        rule = "specs wrap units and blocks, which grain 'stage' does not show"
        raise PlanError("plan/illegal", "grain", "stage", rule, legal=["unit", "operator"])
    for spec in specs:
        if spec.axis not in mesh.names:
            where = f"policy.{spec.family}.axis"
            rule = f"{mesh!r} has no such axis"
            raise PlanError("plan/illegal", where, spec.axis, rule, legal=mesh.names)
    for at, spec in enumerate(specs):
        taken = {other.axis: other.family for other in specs[:at]}
        if spec.axis in taken:
            where = f"policy.{spec.family}.axis"
            rule = f"the {taken[spec.axis]} policy has this axis already; one axis splits one thing"
            free = [name for name in mesh.names if name not in {each.axis for each in specs}]
            raise PlanError("plan/illegal", where, spec.axis, rule, legal=free)


def _finish(
    chunks: Sequence[Chunk],
    placed: Placed,
    model_specs: Sequence[Spec],
    data_specs: Sequence[Spec],
) -> list[Action]:
    """The flat list, closed by the optimizer, which waits for every reduction, and by the gathers
    of what ranks have updated a part of."""
    actions = list(chain.from_iterable(chunk.actions for chunk in chunks))
    units = dict.fromkeys(unit for chunk in chunks for unit in chunk.units)
    waits = tuple(a.label for a in actions if a.label.startswith("reduce:"))
    computed = [a.label for a in actions if isinstance(a, Compute)][-1:]
    last = sum_partial_gradients(units, placed, model_specs, waits or tuple(computed))
    actions += last
    waits += tuple(a.label for a in last)
    elements = sum(map(placed.local_trainable, units))
    moved = elements * 4 * 7  # AdamW in fp32: reads p, g, m, v and writes p, m, v
    actions.append(
        Compute(
            op="optimizer",
            label="O",
            phase="O",
            after=waits,
            flops=12.0 * elements,
            moved_bytes=moved,
        )
    )
    return [*actions, *gather_updated(units, placed, data_specs, "O")]
