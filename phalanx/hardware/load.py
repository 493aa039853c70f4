"""Reading machine files and cluster shorthand such as "8xh100"."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from phalanx.errors import JobError, nearest_names
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
        JobError: `registry/unknown` with the nearest machines; `job/missing`, `job/unknown-key` or
            `unit/unknown` for a file that is incomplete or says something else.
    """
    path = Path(name) if name.endswith(".toml") else _folder() / f"{name}.toml"
    if not path.is_file():
        known = machine_names()
        legal = nearest_names(name, known) or known
        raise JobError("registry/unknown", "machine", repr(name), "no such machine", legal=legal)
    try:
        table = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise JobError("job/syntax", str(path), None, str(error)) from None
    return _machine(table, path)


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
    title, domain = str(table["title"]), int(table["devices_per_domain"])
    return Machine(name=path.stem, title=title, devices_per_domain=domain, **figures)


def _figure(entry: Any, name: str, file: str) -> Figure:
    where = f"{file}: {name}"
    if not isinstance(entry, dict) or set(entry) != {"value", "kind", "source", "date"}:
        rule = "must be a table with value, kind, source and date"
        raise JobError("job/bad-value", where, entry, rule)
    if entry["kind"] not in _SOURCES:
        raise JobError(
            "job/bad-value", f"{where}.kind", entry["kind"], "no such kind", legal=_SOURCES
        )
    dimension = _FIGURES[name]
    assert dimension in UNITS
    value = parse_quantity(entry["value"], dimension, f"{where}.value")
    return Figure(value, entry["kind"], entry["source"], str(entry["date"]))


def parse_cluster(text: str) -> Cluster:
    """ "8xh100" as 8 devices of the machine h100; a bare name is one device.

    Raises:
        JobError: `job/bad-value` for another form, `registry/unknown` for an unknown machine.
    """
    match = re.fullmatch(r"(?:(\d+)[xX*])?([\w.\-/]+)", text.strip())
    if match is None or match[1] == "0":
        raise JobError(
            "job/bad-value", "cluster", repr(text), "must be COUNTxMACHINE", legal=["8xh100"]
        )
    name = match[2] if match[2].endswith(".toml") else match[2].lower()
    return Cluster(read_machine(name), int(match[1] or 1))
