"""Cluster shorthand such as "8xh100"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from phalanx.errors import JobError, shown
from phalanx.hardware.load import MAX_DEVICES, machine_names, read_machine
from phalanx.hardware.machine import Machine


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


def parse_cluster(text: str) -> Cluster:
    """ "8xh100" as 8 devices of the machine h100; a bare name is one device, "v5p-8" a slice.

    Google names slices of some TPUs by their TensorCores, two to a chip: v5p-8 is 4 chips.

    Raises:
        JobError: `job/bad-value` for another form, `registry/unknown` for an unknown machine.
    """
    match = re.fullmatch(r"(?:([0-9]+)[xX*] *)?([\w.\-/]+|.+\.toml)", text.strip())
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
    names = machine_names()
    if not re.fullmatch("[0-9]+", digits) or kind not in names or name in names:
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
