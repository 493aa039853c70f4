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


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a machine, in SI units, and where it comes from."""

    value: float
    kind: str  # measured, published, assumption
    source: str
    date: str


# name in the file -> dimension ("": a share of 1); all but `_DEFAULTS` are required, so that no
# cost model has to guess
_FIGURES = {
    "matmul": "flops_per_s",
    "memory": "bytes",
    "usable_memory_frac": "",
    "memory_bandwidth": "bytes_per_s",
    "link_bandwidth": "bytes_per_s",
    "network_bandwidth": "bytes_per_s",
    "link_latency": "s",
    "network_latency": "s",
    "launch_overhead": "s",
    "price": "usd_per_h",
}
_DEFAULTS = {
    "usable_memory_frac": Figure(
        0.9, "assumption", "the file does not say; the share that vLLM takes by default", "2026-11"
    )
}
_DIVIDED_BY = ("flops_per_s", "bytes", "bytes_per_s")  # by cost models: zero would be no machine
MAX_DEVICES = 10_000_000  # of a cluster; every rank takes memory in a plan
_SOURCES = ("formula", "simulated", "measured", "published", "assumption")


@dataclass(frozen=True)
class Machine:
    """One kind of device.

    Attributes:
        name: of the file.
        title: as its maker calls it.
        devices_per_domain: devices that share the fast links.
        matmul: sustained dense matrix products in bf16, FLOP/s (not the data sheet's peak).
        memory, memory_bandwidth: of one device, bytes and bytes/s.
        usable_memory_frac: share of `memory` that tensors may fill.
        cores_per_device: what names of slices such as "v5p-8" count; 0: there are no such names.
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
    usable_memory_frac: Figure
    cores_per_device: int = 0

    @property
    def usable_bytes(self) -> float:
        """Memory of a device that tensors may fill."""
        return self.memory.value * self.usable_memory_frac.value

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
    required = {"title", "devices_per_domain", *_FIGURES} - set(_DEFAULTS)
    legal = {*required, *_DEFAULTS, "cores_per_device"}
    for name in table:
        if name not in legal:
            near = nearest_names(name, legal)
            raise JobError(
                "job/unknown-key", f"{path.name}: {name}", None, "no such key", legal=near
            )
    for name in sorted(required):
        if name not in table:
            raise JobError("job/missing", f"{path.name}: {name}", None, "every machine needs it")
    figures = {
        name: _figure(table[name], name, path.name) if name in table else _DEFAULTS[name]
        for name in _FIGURES
    }
    return Machine(
        name=path.stem,
        title=read_value(table["title"], str, f"{path.name}: title"),
        devices_per_domain=_count(table, "devices_per_domain", path, low=1),
        cores_per_device=_count({"cores_per_device": 0} | table, "cores_per_device", path, low=0),
        **figures,
    )


def _count(table: dict[str, Any], name: str, path: Path, low: int) -> int:
    where = f"{path.name}: {name}"
    value = read_value(table[name], int, where)
    if value < low:
        raise JobError("job/bad-value", where, value, f"must be at least {low}", legal=[low])
    return value


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


def parse_cluster(text: str) -> Cluster:
    """ "8xh100" as 8 devices of the machine h100; a bare name is one device, "v5p-8" a slice.

    Google names slices of TPU v4 and v5p by their TensorCores, two to a chip: v5p-8 is 4 chips.

    Raises:
        JobError: `job/bad-value` for another form, `registry/unknown` for an unknown machine.
    """
    match = re.fullmatch(r"(?:(\d+)[xX*] *)?([\w.\-/]+)", text.strip())
    if match is None:
        rule = "must be COUNTxMACHINE"
        raise JobError("job/bad-value", "cluster", shown(text), rule, legal=["8xh100"])
    name = match[2] if match[2].endswith(".toml") else match[2].lower()
    if match[1] is None and (cluster := _slice(name)):
        return cluster
    return Cluster(read_machine(name), _num_devices(match[1] or "1", name, text))


def _num_devices(digits: str, name: str, text: str) -> int:
    digits = digits.lstrip("0")
    if not digits:
        rule = "must have at least one device"
        raise JobError("job/bad-value", "cluster", shown(text), rule, legal=[f"1x{name}"])
    if len(digits) > len(str(MAX_DEVICES)) or int(digits) > MAX_DEVICES:
        rule, legal = f"must have at most {MAX_DEVICES:,} devices", [f"{MAX_DEVICES}x{name}"]
        raise JobError("job/bad-value", "cluster", shown(text), rule, legal=legal)
    return int(digits)


def _slice(name: str) -> Cluster | None:
    """The devices of a slice by Google's name; None for what is no such name."""
    kind, _, digits = name.rpartition("-")
    if not (
        kind and digits.isdecimal() and kind in machine_names() and name not in machine_names()
    ):
        return None
    machine = read_machine(kind)
    if not machine.cores_per_device:
        return None
    cores = _num_devices(digits, kind, name)
    if cores % machine.cores_per_device:
        rule = f"counts cores, {machine.cores_per_device} to a device"
        near = f"{kind}-{cores + cores % machine.cores_per_device}"
        raise JobError("job/bad-value", "cluster", shown(name), rule, legal=[near])
    return Cluster(machine, cores // machine.cores_per_device)
