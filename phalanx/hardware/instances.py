"""Hosts by the names that clouds give them: "p5.48xlarge" holds eight H100.

The table (`instances.csv`) is read when a cluster's name is no machine's, so that others do not
wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from phalanx.hardware.load import read_machine
from phalanx.hardware.machine import Figure, Machine

_TABLE = "instances.csv"
_LARGEST_HOST = 16  # devices; larger domains of fast links are racks or tori, and span hosts
_BYTES_PER_GBIT = 1e9 / 8
_SAGEMAKER = "ml."
_AZURE = "standard_"


@dataclass(frozen=True)
class Instance:
    """One kind of host that a cloud rents out.

    Attributes:
        name: as the cloud calls it, in small letters.
        machine: name of its devices' machine.
        devices: that it holds.
        network_gbit_per_s: of the whole host, each way, as it can be sustained; 0: not known.
        source: of the row.
    """

    name: str
    machine: str
    devices: int
    network_gbit_per_s: float
    source: str

    def machine_of(self, hosts: int) -> Machine:
        """Its machine, as so many such hosts have it.

        Between several hosts the network is what theirs gives each device, where it is known, and
        fast links end at a host's edge, also those of a host that holds a part of what could share
        them. One host needs no network, and is the machine as it stands, unless it joins more
        devices than the machine's domain.
        """
        machine = read_machine(self.machine)
        domain = machine.devices_per_domain
        is_wider = 1 < domain < self.devices
        if hosts == 1 and not is_wider:
            return machine
        changes: dict[str, Any] = {"host_devices": self.devices}
        if domain == 1 or is_wider or self.devices < domain <= _LARGEST_HOST:
            changes["devices_per_domain"] = self.devices
        if self.network_gbit_per_s:
            rate = self.network_gbit_per_s * _BYTES_PER_GBIT / self.devices
            source = f"{self.network_gbit_per_s:g} Gbit/s of a {self.name} / {self.devices}"
            source += f"; {self.source}"
            changes["network_bandwidth"] = Figure(rate, "published", source, "2026")
        return replace(machine, **changes)


def instance_called(name: str) -> Instance | None:
    """The host of that name, with or without "ml." or "Standard_" in front; None if not known."""
    plain, known = name.strip().lower().removeprefix(_SAGEMAKER), _instances()
    return known.get(plain) or known.get(_AZURE + plain)


def instance_names() -> list[str]:
    """All that are known."""
    return list(_instances())


@cache
def _instances() -> dict[str, Instance]:
    import csv

    text = (files("phalanx.hardware") / _TABLE).read_text(encoding="utf-8")
    return {
        row["name"]: Instance(
            name=row["name"],
            machine=row["machine"],
            devices=int(row["devices"]),
            network_gbit_per_s=float(row["network_gbit_per_s"] or 0.0),
            source=row["source"],
        )
        for row in csv.DictReader(text.splitlines())
    }
