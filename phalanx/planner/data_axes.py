"""Whether data policies fit a mesh, a model and one another: known before a process starts."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from phalanx.errors import PlanError
from phalanx.mesh import Mesh
from phalanx.models.config import DecoderConfig
from phalanx.models.spec import canonical_tensors
from phalanx.policy import Spec

DATA_AXES = ("replicate", "shard")
PLACEMENTS = ("shard", "update", "replicate")


def specs_by_placement(specs: Sequence[Spec], axes: Sequence[str]) -> dict[str, Spec]:
    """The data policy of each placement.

    Args:
        specs: of the family data.
        axes: of the mesh.

    Raises:
        PlanError: `plan/illegal` for an axis that the mesh lacks, a placement that is no data
            placement or comes twice, or two that both cut the optimizer's state.
    """
    found: dict[str, Spec] = {}
    for spec in specs:
        placement = spec.rules()[-1].placement
        where = f"policy.{spec.family}.{spec.policy_name}"
        if placement not in PLACEMENTS or any(r.placement != placement for r in spec.rules()):
            rule = "is no placement of data parallelism"
            raise PlanError("plan/illegal", where, placement, rule, legal=PLACEMENTS)
        if placement in found:
            raise PlanError("plan/illegal", where, placement, "only one policy may place so")
        if spec.axis not in axes:
            rule = "the mesh has no such axis"
            raise PlanError("plan/illegal", f"{where}.axis", spec.axis, rule, legal=axes)
        found[placement] = spec
    if "shard" in found and "update" in found:
        names = [spec.policy_name for spec in specs]
        rule, legal = "both cut the optimizer's state", [found["shard"].policy_name]
        raise PlanError("plan/illegal", "plan.data", names, rule, legal=legal)
    return found


def require_own_axes(specs: Sequence[Spec]) -> None:
    """Refuse two policies on one axis, and rows that are dealt over other axes than data axes."""
    taken: dict[str, Spec] = {}
    for spec in specs:
        if spec.axis in taken:
            where, before = f"plan.{spec.family}", taken[spec.axis].policy_name
            rule = f"lies on {spec.axis!r} as {before} does; one axis splits one thing"
            raise PlanError("plan/illegal", where, spec.policy_name, rule)
        if (spec.family == "data") != (spec.axis in DATA_AXES):
            where = f"plan.{spec.family}.axis"
            rule = f"rows are dealt over {' and '.join(DATA_AXES)}, and over nothing else"
            legal = DATA_AXES if spec.family == "data" else ()
            raise PlanError("plan/illegal", where, spec.axis, rule, legal=legal)
        taken[spec.axis] = spec


def require_sums(mesh: Mesh, data: Sequence[Spec]) -> None:
    """Refuse an axis whose ranks would each train a model of their own."""
    summed = {spec.axis for spec in data}
    for axis in DATA_AXES:
        if axis in mesh.names and mesh.degree(axis) > 1 and axis not in summed:
            names = [spec.policy_name for spec in data]
            rule = "no policy of plan.data sums the gradients of its ranks"
            policy = "replicate" if axis == "replicate" else "fsdp"
            legal = [f"plan.data = {[*names, policy]}"]
            raise PlanError(
                "plan/illegal", f"plan.mesh.{axis}", mesh.degree(axis), rule, legal=legal
            )


def require_order(axes: Sequence[str], data: Sequence[Spec], *, is_cut: bool) -> None:
    """Refuse shards outside of replicas beside a tensor axis, which torch does not join.

    Args:
        axes: of the mesh, outermost first.
        is_cut: whether a tensor axis has cut weights.
    """
    placed = specs_by_placement(data, axes)
    shard, replicate = placed.get("shard"), placed.get("replicate")
    if not is_cut or shard is None or replicate is None:
        return
    if axes.index(replicate.axis) > axes.index(shard.axis):
        legal = [replicate.axis, shard.axis]
        rule = f"beside a tensor axis {legal[0]} must come before {legal[1]}: torch joins no others"
        raise PlanError("plan/illegal", "plan.mesh", list(axes), rule, legal=[legal])


def require_cast(data: Sequence[Spec], master: str, compute: str) -> None:
    """Refuse masters in another dtype than what computes where no data policy keeps both."""
    placements = {spec.rules()[-1].placement for spec in data}
    if placements & {"shard", "update"}:
        return
    rule = f"casts nothing, so weights kept in {master} cannot be computed in {compute}"
    legal = ["fsdp or zero, on an axis of any size", f"model.dtype = {master}"]
    names = [spec.policy_name for spec in data]
    raise PlanError("plan/illegal", "plan.data", names, rule, legal=legal)


def require_units(data: Sequence[Spec], config: DecoderConfig) -> None:
    """Refuse a pattern of units that matches no module: the model would be one unit, gathered
    whole."""
    tensors = canonical_tensors(config)
    parts = {name.rpartition(".")[0] for name in tensors}
    modules = {
        ".".join(words[:count]) for words in (p.split(".") for p in parts) for count in range(1, 9)
    }
    for spec in data:
        pattern = spec.rules()[-2].pattern
        if not any(fnmatchcase(module, pattern) for module in modules):
            rule = "names no module of this model, which would be one unit"
            where, legal = f"policy.data.{spec.policy_name}.units", ["*layers.*"]
            raise PlanError("plan/illegal", where, pattern, rule, legal=legal)
