"""Machines: one TOML file each, every number with unit, source and date."""

from phalanx.hardware.load import (
    Cluster,
    Figure,
    Machine,
    machine_names,
    parse_cluster,
    read_machine,
)

__all__ = ["Cluster", "Figure", "Machine", "machine_names", "parse_cluster", "read_machine"]
