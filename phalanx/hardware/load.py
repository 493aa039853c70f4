"""Reading machine files and cluster shorthand such as "8xh100"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from phalanx.errors import JobError, nearest_names, shown
from phalanx.strict import parse_toml, read_value
from phalanx.units import UNITS, parse_quantity

# name in the file -> dimension; all are required, so that no cost model has to guess
_FIGURES = {
    "matmul": "flops_per_s",
    "memory": "bytes",
    "memory_bandwidth": "bytes_per_s",
    "link_bandwidth": "bytes_per_s",
    "network_bandwidth": "bytes_per_s",
    "link_latency": "s",
    "network_latency": "s",
    "launch_overhead": "s",
    "price": "usd_per_h",
}
_DIVIDED_BY = ("flops_per_s", "bytes", "bytes_per_s")  # by cost models: zero would be no machine
MAX_DEVICES = 10_000_000  # of a cluster; every rank takes memory in a plan
_SOURCES = ("formula", "simulated", "measured", "published", "assumption")


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a machine, in SI units, and where it comes from."""

    value: float
    kind: str  # measured, published, assumption
    source: str
    date: str


@dataclass(frozen=True)
class Machine:
    """One kind of device.

    Attributes:
        name: of the file.
        title: as its maker calls it.
        devices_per_domain: devices that share the fast links.
        matmul: sustained dense matrix products in bf16, FLOP/s (not the data sheet's peak).
        memory, memory_bandwidth: of one device, bytes and bytes/s.
        link_bandwidth, link_latency: inside a domain, per device and direction.
        network_bandwidth, network_latency: between domains, per device and direction.
        launch_overhead: seconds of host work per operator that compute does not hide.
        price: USD per device and hour.
    """

    name: str
    title: str
    devices_per_domain: int
    matmul: Figure
    memory: Figure
    memory_bandwidth: Figure
    link_bandwidth: Figure
    network_bandwidth: Figure
    link_latency: Figure
    network_latency: Figure
    launch_overhead: Figure
    price: Figure

    def figures(self) -> dict[str, Figure]:
        """All numbers by name."""
        return {name: getattr(self, name) for name in _FIGURES}


@dataclass(frozen=True, slots=True)
class Cluster:
    """So many devices of one kind."""

    machine: Machine
    num_devices: int

    def __str__(self) -> str:
        return f"{self.num_devices}x{self.machine.name}"

    def to_dict(self) -> dict[str, Any]:
        """What a plan remembers of it."""
        figures = {name: figure.value for name, figure in self.machine.figures().items()}
        return {"machine": self.machine.name, "num_devices": self.num_devices, "figures": figures}


def _folder() -> Path:
    return Path(str(files("phalanx.hardware")))


def machine_names() -> list[str]:
    """Machines that come with Phalanx."""
    return sorted(path.stem for path in _folder().glob("*.toml"))


@cache
def read_machine(name: str) -> Machine:
    """A machine by its name, or by the path of a TOML file.

    Raises:
        JobError: `registry/unknown` with the nearest machines; `job/missing`, `job/unknown-key`,
            `job/bad-value`, `job/syntax` or `unit/unknown` for a file that is incomplete or says
            something else.
    """
    known = machine_names()
    is_path = name.endswith(".toml")
    rule = "no such machine"
    if is_path or name in known:
        path = Path(name) if is_path else _folder() / f"{name}.toml"
        try:
            content = path.read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a path with a NUL
            rule = getattr(error, "strerror", None) or str(error)
        else:
            return _machine(parse_toml(content, str(path)), path)
    legal = nearest_names(name, known) or known
    raise JobError("registry/unknown", "machine", shown(name), rule, legal=legal)


def _machine(table: dict[str, Any], path: Path) -> Machine:
    legal = {"title", "devices_per_domain", *_FIGURES}
    for name in table:
        if name not in legal:
            near = nearest_names(name, legal)
            raise JobError(
                "job/unknown-key", f"{path.name}: {name}", None, "no such key", legal=near
            )
    for name in sorted(legal):
        if name not in table:
            raise JobError("job/missing", f"{path.name}: {name}", None, "every machine needs it")
    figures = {name: _figure(table[name], name, path.name) for name in _FIGURES}
    title = read_value(table["title"], str, f"{path.name}: title")
    where = f"{path.name}: devices_per_domain"
    domain = read_value(table["devices_per_domain"], int, where)
    if domain < 1:
        raise JobError("job/bad-value", where, domain, "must be at least 1", legal=[1])
    return Machine(name=path.stem, title=title, devices_per_domain=domain, **figures)


def _figure(entry: Any, name: str, file: str) -> Figure:
    where = f"{file}: {name}"
    if not isinstance(entry, dict) or set(entry) != {"value", "kind", "source", "date"}:
        rule = "must be a table with value, kind, source and date"
        raise JobError("job/bad-value", where, shown(entry), rule)
    kind = read_value(entry["kind"], str, f"{where}.kind")
    if kind not in _SOURCES:
        raise JobError("job/bad-value", f"{where}.kind", kind, "no such kind", legal=_SOURCES)
    source = read_value(entry["source"], str, f"{where}.source")
    date = read_value(entry["date"], str, f"{where}.date")
    return Figure(_amount(entry["value"], _FIGURES[name], f"{where}.value"), kind, source, date)


def _amount(text: Any, dimension: str, where: str) -> float:
    assert dimension in UNITS
    value = read_value(parse_quantity(text, dimension, where), float, where)
    if value < 0 or (value == 0 and dimension in _DIVIDED_BY):
        rule = "must be above 0" if dimension in _DIVIDED_BY else "must be at least 0"
        raise JobError("job/bad-value", where, shown(text), rule)
    return value


def parse_cluster(text: str) -> Cluster:
    """ "8xh100" as 8 devices of the machine h100; a bare name is one device.

    Raises:
        JobError: `job/bad-value` for another form, `registry/unknown` for an unknown machine.
    """
    match = re.fullmatch(r"(?:(\d+)[xX*])?([\w.\-/]+)", text.strip())
    if match is None:
        rule = "must be COUNTxMACHINE"
        raise JobError("job/bad-value", "cluster", shown(text), rule, legal=["8xh100"])
    name = match[2] if match[2].endswith(".toml") else match[2].lower()
    digits = (match[1] or "1").lstrip("0")
    if not digits:
        rule = "must have at least one device"
        raise JobError("job/bad-value", "cluster", shown(text), rule, legal=[f"1x{name}"])
    if len(digits) > len(str(MAX_DEVICES)) or int(digits) > MAX_DEVICES:
        rule, legal = f"must have at most {MAX_DEVICES:,} devices", [f"{MAX_DEVICES}x{name}"]
        raise JobError("job/bad-value", "cluster", shown(text), rule, legal=legal)
    return Cluster(read_machine(name), int(digits))
