"""Machines: reading their files."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from phalanx.errors import JobError, nearest_names, shown
from phalanx.hardware.machine import (
    HALVES,
    OPTIONAL,
    PRICE_TERMS,
    REQUIRED,
    TEXTS,
    Figure,
    Machine,
)
from phalanx.strict import parse_toml, read_value
from phalanx.units import UNITS, parse_quantity

_DEFAULTS = {
    "usable_memory_frac": Figure(
        0.9, "assumption", "the file does not say; the share that vLLM takes by default", "2026-11"
    )
}
_DIVIDED_BY = ("flops_per_s", "bytes", "bytes_per_s")  # by cost models: zero would be no machine
_SOURCES = ("formula", "simulated", "measured", "published", "assumption")
_COUNTS = {"devices_per_domain": 1, "cores_per_device": 0}  # and the least that they may be
MAX_DEVICES = 10_000_000  # of a cluster; every rank takes memory in a plan


def _folder() -> Path:
    return Path(str(files("phalanx.hardware")))


@cache
def _shipped() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _folder().glob("*.toml")))


def machine_names() -> list[str]:
    """Machines that come with Phalanx."""
    return list(_shipped())


def read_machine(name: str) -> Machine:
    """A machine by its name, or by the path of a TOML file.

    Raises:
        JobError: `registry/unknown` with the nearest machines; `job/missing`, `job/unknown-key`,
            `job/bad-value`, `job/syntax` or `unit/unknown` for a file that is incomplete,
            contradicts itself or says something else.
    """
    if name in _shipped():
        return _shipped_machine(name)
    rule = "no such machine"
    if name.endswith(".toml"):
        path = Path(name)
        try:
            content = path.read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a path with a NUL
            rule = getattr(error, "strerror", None) or str(error)
        else:
            return _machine(parse_toml(content, str(path)), path)
    legal = nearest_names(name, _shipped()) or list(_shipped())
    raise JobError("registry/unknown", "machine", shown(name), rule, legal=legal)


@cache
def _shipped_machine(name: str) -> Machine:
    path = _folder() / f"{name}.toml"
    return _machine(parse_toml(path.read_bytes(), str(path)), path)


def _machine(table: dict[str, Any], path: Path) -> Machine:
    required = {"title", "devices_per_domain", *REQUIRED} - set(_DEFAULTS)
    legal = {*required, *_DEFAULTS, *OPTIONAL, *TEXTS, *_COUNTS}
    for name in table:
        if name not in legal:
            near = nearest_names(name, legal)
            raise JobError(
                "job/unknown-key", f"{path.name}: {name}", None, "no such key", legal=near
            )
    for name in sorted(required):
        if name not in table:
            raise JobError("job/missing", f"{path.name}: {name}", None, "every machine needs it")
    dimensions = REQUIRED | OPTIONAL
    figures = {
        name: _figure(table[name], dimensions[name], f"{path.name}: {name}")
        for name in dimensions
        if name in table
    }
    given: dict[str, Any] = _DEFAULTS | figures
    for name in TEXTS:
        given[name] = read_value(table.get(name, ""), str, f"{path.name}: {name}")
    for name, low in _COUNTS.items():
        given[name] = _count(table, name, path, low)
    title = read_value(table["title"], str, f"{path.name}: title")
    machine = Machine(name=path.stem, title=title, **given)
    _require_consistent(machine, path)
    return machine


def _require_consistent(machine: Machine, path: Path) -> None:
    """No measured rate above the peak of its own precision, no spot price above the other."""
    pairs = [
        ("matmul", machine.matmul, "bf16_peak", machine.bf16_peak),
        ("fp8_matmul", machine.fp8_matmul, "fp8_peak", machine.fp8_peak),
        ("fp4_matmul", machine.fp4_matmul, "fp4_peak", machine.fp4_peak),
    ]
    for name, rate, peak_name, peak in pairs:
        if rate and peak and rate.value > peak.value:
            rule = f"is above {peak_name} = {peak.value:g}"
            raise JobError("job/bad-value", f"{path.name}: {name}", rate.value, rule)
    if machine.half_precision and machine.half_precision not in HALVES:
        where, text = f"{path.name}: half_precision", shown(machine.half_precision)
        raise JobError("job/bad-value", where, text, "no such format", legal=HALVES)
    for name in ("price_terms", "second_price_terms"):
        terms = getattr(machine, name)
        if terms and terms not in PRICE_TERMS:
            where = f"{path.name}: {name}"
            raise JobError("job/bad-value", where, shown(terms), "no such terms", legal=PRICE_TERMS)
    if machine.price and machine.spot_price and machine.spot_price.value > machine.price.value:
        rule = f"is above price = {machine.price.value:g}"
        where, value = f"{path.name}: spot_price", machine.spot_price.value
        raise JobError("job/bad-value", where, value, rule)
    if machine.fp8_peak and not machine.bf16_peak:
        rule = "is needed where fp8_peak is given: it says which share of a peak products reach"
        raise JobError("job/missing", f"{path.name}: bf16_peak", None, rule)


def _count(table: dict[str, Any], name: str, path: Path, low: int) -> int:
    where = f"{path.name}: {name}"
    value = read_value(table.get(name, low), int, where)
    if value < low:
        raise JobError("job/bad-value", where, value, f"must be at least {low}", legal=[low])
    return value


def _figure(entry: Any, dimension: str, where: str) -> Figure:
    if not isinstance(entry, dict) or set(entry) != {"value", "kind", "source", "date"}:
        rule = "must be a table with value, kind, source and date"
        raise JobError("job/bad-value", where, shown(entry), rule)
    kind = read_value(entry["kind"], str, f"{where}.kind")
    if kind not in _SOURCES:
        raise JobError("job/bad-value", f"{where}.kind", kind, "no such kind", legal=_SOURCES)
    source = read_value(entry["source"], str, f"{where}.source")
    date = read_value(entry["date"], str, f"{where}.date")
    return Figure(_amount(entry["value"], dimension, f"{where}.value"), kind, source, date)


def _amount(text: Any, dimension: str, where: str) -> float:
    if not dimension:
        return _share(text, where)
    assert dimension in UNITS
    value = read_value(parse_quantity(text, dimension, where), float, where)
    if value < 0 or (value == 0 and dimension in _DIVIDED_BY):
        rule = "must be above 0" if dimension in _DIVIDED_BY else "must be at least 0"
        raise JobError("job/bad-value", where, shown(text), rule)
    return value


def _share(value: Any, where: str) -> float:
    share = read_value(value, float, where)
    if not 0.0 < share <= 1.0:
        raise JobError(
            "job/bad-value", where, shown(value), "must lie in 0 < share <= 1", legal=[1]
        )
    return share
