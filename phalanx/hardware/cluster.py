"""Cluster shorthand such as "8xh100", also by the names of a cloud's hosts ("2xp5.48xlarge")."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from phalanx.errors import JobError, nearest_names, shown
from phalanx.hardware.instances import Instance, instance_called, instance_names
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

    Google names slices of some TPUs by their TensorCores, two to a chip: v5p-8 is 4 chips. Hosts
    that clouds rent out stand for their devices: "2xp5.48xlarge" is 16 of h100.

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
    if instance := named_instance(name):
        hosts = _num_devices(match[1] or "1", name, text, instance.devices)
        return Cluster(instance.machine_of(hosts), hosts * instance.devices)
    return Cluster(_machine(name), _num_devices(match[1] or "1", name, text))


def named_instance(name: str) -> Instance | None:
    """The host that a name without a count means; None for machines, files and unknown names."""
    if name in machine_names() or name.endswith(".toml"):
        return None
    return instance_called(name)


def _machine(name: str) -> Machine:
    try:
        return read_machine(name)
    except JobError as error:
        if error.code != "registry/unknown" or name.endswith(".toml"):
            raise
        near = nearest_names(name, [*machine_names(), *instance_names()])
        legal = near or error.legal
        raise JobError(error.code, "machine", shown(name), "no such machine", legal=legal) from None


def _num_devices(digits: str, name: str, text: str, of_one: int = 1) -> int:
    """A number of machines, or of hosts of so many devices each."""
    digits = digits.lstrip("0")
    if not digits:
        rule = "must have at least one device"
        raise JobError("job/bad-value", "cluster", shown(text), rule, legal=[f"1x{name}"])
    most = MAX_DEVICES // of_one
    if len(digits) > len(str(most)) or int(digits) > most:
        rule, legal = f"must have at most {MAX_DEVICES:,} devices", [f"{most}x{name}"]
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
