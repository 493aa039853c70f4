"""Which modules are gathered and reduced together: data specs read along a module tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from phalanx.errors import PlanError
from phalanx.policy import Rule, Spec


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


_Rules = tuple[Rule | None, ...]  # one per placement


def units_of(
    root: nn.Module, specs: Sequence[Spec | None], dtypes: dict[str, str]
) -> list[BoundUnit]:
    """The root; the outermost modules whose rules are others than the root's; and inside those, by
    rule, the modules whose rules are others again.

    Raises:
        PlanError: `plan/illegal` for a weight that two units share.
    """

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
    _require_unshared(units)
    return [replace(each, is_frozen=not claimed(units, each)) for each in units]


def _require_unshared(units: Sequence[BoundUnit]) -> None:
    """Raise `plan/illegal` for a weight that modules of two units use: only what holds both may
    gather or sum it."""
    owner = {
        inner: unit for unit in units for each in unit.modules for inner in each.modules()
    }  # units inside others come later
    first: dict[nn.Parameter, tuple[str, BoundUnit]] = {}
    for path, module in units[0].module.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            here = f"{path}.{name}".lstrip("."), owner[module]
            before = first.setdefault(parameter, here)
            if before[1] is not owner[module]:
                named = [f"{each[0]} (unit {each[1].name or 'root'!r})" for each in (before, here)]
                rule = "are one weight in two units; it must be in one that holds both"
                raise PlanError("plan/illegal", "units", named, rule, legal=["the root: no unit"])


def _is_below(path: str, above: str | None) -> bool:
    return above is not None and path.startswith(f"{above}.")


def _pattern(rules: _Rules) -> str:
    return next(rule.pattern for rule in rules if rule is not None)


def _with_dtypes(spec: Spec | None, path: str, dtypes: dict[str, str]) -> Rule | None:
    rule = None if spec is None else spec.rule_for(path)
    missing = {name: dtype for name, dtype in dtypes.items() if rule and not getattr(rule, name)}
    return replace(rule, **missing) if missing else rule


def claimed(units: Sequence[BoundUnit], unit: BoundUnit) -> list[nn.Parameter]:
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
