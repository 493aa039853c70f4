"""Names to policies. A policy registers itself where it is defined; nothing else lists it.

A family's package (`phalanx.policies.<family>`) is imported on the first look-up in that family, so
adding a file adds a choice to job files, the command line, contract tests and docs. Other packages
join through the entry-point group `phalanx.policies` (a module each).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import Any, TypeVar

from phalanx.errors import JobError, nearest_names, shown
from phalanx.policy import Policy
from phalanx.strict import read_record, read_value

PolicyT = TypeVar("PolicyT", bound=type[Policy])

SHAPE_OF_FAMILY: dict[str, str] = {
    "data": "spec",
    "tensor": "spec",
    "context": "spec",
    "expert": "spec",
    "pipeline": "order",
    "tiles": "order",
    "denoise": "order",
    "balance": "assign",
    "place": "assign",
    "sync": "react",
    "recover": "react",
    "serve": "react",
    "cluster": "react",
    "speculate": "react",
    "rollout": "react",
}
GRAINS = ("step", "stage", "unit", "operator")
STATUSES = ("planned", "experimental", "verified")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a strategy comes from: title, identifier (arXiv, DOI, repository), section."""

    title: str
    id: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """One registered policy."""

    family: str
    name: str
    cls: type[Policy]
    grain: str
    source: Source
    status: str


_entries: dict[str, dict[str, Entry]] = {family: {} for family in SHAPE_OF_FAMILY}
_loaded: set[str] = set()


def register(family: str, name: str, *, grain: str, source: Source, status: str = "experimental"):
    """Class decorator: the policy is `name` in `family`.

    Args:
        grain: the coarsest of `GRAINS` that keeps the policy's decision in a real world.
        status: "verified" only when its law test, its published number and its real run exist.
    """
    assert grain in GRAINS and status in STATUSES, (grain, status)

    def add(cls: PolicyT) -> PolicyT:
        require_family(family)
        known = _entries[family].get(name)
        if known is not None and known.cls.__qualname__ != cls.__qualname__:
            rule = f"already registered by {known.cls.__module__}; choose another name"
            raise JobError("registry/duplicate", f"policy.{family}", repr(name), rule)
        cls.family, cls.policy_name = family, name
        _entries[family][name] = Entry(family, name, cls, grain, source, status)
        return cls

    return add


def require_family(family: str) -> None:
    """Raise `registry/unknown` with the nearest families, `job/bad-value` for what is no text."""
    if read_value(family, str, "policy family") not in SHAPE_OF_FAMILY:
        raise JobError(
            "registry/unknown",
            "policy family",
            shown(family),
            "no such family",
            legal=nearest_names(family, SHAPE_OF_FAMILY) or sorted(SHAPE_OF_FAMILY),
        )


def _load(family: str) -> None:
    require_family(family)
    if family in _loaded:
        return
    _loaded.add(family)
    try:
        package = import_module(f"phalanx.policies.{family}")
    except ModuleNotFoundError as error:
        if error.name != f"phalanx.policies.{family}":
            raise
        return  # a family without a policy yet
    for module in iter_modules(package.__path__):
        import_module(f"{package.__name__}.{module.name}")
    for point in entry_points(group="phalanx.policies"):
        point.load()


def entries(family: str | None = None) -> list[Entry]:
    """All registered policies, of one family or of all, by family and name."""
    chosen = [family] if family else list(SHAPE_OF_FAMILY)
    for each in chosen:
        _load(each)
    return [_entries[f][name] for f in chosen for name in sorted(_entries[f])]


def lookup(family: str, name: str, where: str = "") -> Entry:
    """The entry of `name`.

    Raises:
        JobError: `registry/unknown` with the nearest names of that family.
    """
    _load(family)
    if name not in _entries[family]:
        raise JobError(
            "registry/unknown",
            where or f"policy.{family}",
            shown(name),
            f"no {family} policy of that name",
            legal=nearest_names(name, _entries[family]) or sorted(_entries[family]),
        )
    return _entries[family][name]


def build(family: str, options: str | Mapping[str, Any], where: str = "") -> Any:
    """A policy from its name, or from a table with `name` and its options.

    Raises:
        JobError: `registry/unknown`, or `job/unknown-key`, `job/missing` or `job/bad-value` for
            its options: a policy's fields say by their annotations what they take.
    """
    require_family(family)
    where = where or f"policy.{family}"
    given = read_value(options, str | Mapping[str, Any], where)
    table = {"name": given} if isinstance(given, str) else given
    name = table.pop("name", None)
    if name is None:
        raise JobError("job/missing", f"{where}.name", None, f"a {family} policy needs a name")
    cls = lookup(family, read_value(name, str, f"{where}.name"), where).cls
    return read_record(cls, table, where)
