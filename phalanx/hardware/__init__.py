"""Machines: one TOML file each, every number with unit, source and date."""

from phalanx.hardware.cluster import Cluster, parse_cluster
from phalanx.hardware.cluster_file import read_cluster
from phalanx.hardware.load import machine_names, read_machine
from phalanx.hardware.machine import Figure, Machine
from phalanx.hardware.mixed import Link, MixedCluster, SiteLink
from phalanx.hardware.named import machine_called, machines_called

__all__ = [
    "Cluster",
    "Figure",
    "Link",
    "Machine",
    "MixedCluster",
    "SiteLink",
    "machine_called",
    "machine_names",
    "machines_called",
    "parse_cluster",
    "read_cluster",
    "read_machine",
]
