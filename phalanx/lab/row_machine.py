"""The machine of a published row: the accelerator by its name, with the row's own network.

The same accelerator stands behind 400 Gbit/s of InfiniBand here and 50 Gbit/s of Omni-Path there;
rows that name their network get it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from phalanx.hardware import Figure, Machine
from phalanx.hardware.named import machine_called
from phalanx.lab.csv_rows import CsvRow

_LARGEST_NODE = 16  # devices; a larger domain is a rack or a torus, whatever a node holds
_NETWORK = re.compile(
    r"(?:(?P<many>\d+)x ?)?(?P<kind>[a-z\- ]*?)\(?(?P<rate>\d+(?:\.\d+)?) (?P<unit>[gt])b/s"
    r"(?: (?!per )[a-z]+)?(?: per (?P<per>node|gpu|device))?",
    re.IGNORECASE,
)


def machine_of_row(row: CsvRow) -> Machine | None:
    """None for an accelerator that is not known, or a mixture of several."""
    return _machine(
        row.get("hardware"), row.get("interconnect"), row.count("devices_per_node") or 0
    )


@cache
def _machine(hardware: str, interconnect: str, per_node: int) -> Machine | None:
    machine = machine_called(hardware)
    if machine is None:
        return None
    rate = network_bytes_per_s(interconnect, per_node)
    if rate:
        source = f"the row's interconnect: {interconnect}"
        machine = replace(machine, network_bandwidth=Figure(rate, "published", source, ""))
    if per_node and per_node < machine.devices_per_domain <= _LARGEST_NODE:
        machine = replace(machine, devices_per_domain=per_node)
    return machine


def network_bytes_per_s(interconnect: str, per_node: int) -> float:
    """Bytes/s per device and direction between nodes; 0 where the text does not say.

    "4x Omni-Path 100 Gb/s per node" is four links for all devices of a node, "400 Gb/s per GPU" one
    for each.
    """
    best = 0.0
    for found in _NETWORK.finditer(interconnect):
        if not found["per"] and not found["many"]:
            continue
        rate = float(found["rate"]) * (1e12 if found["unit"].lower() == "t" else 1e9) / 8
        rate *= int(found["many"] or 1)
        is_per_node = (found["per"] or "node").lower() == "node"
        if is_per_node and not per_node:
            continue
        best = rate / per_node if is_per_node else rate
    return best
