"""Machines: one TOML file each, every number with unit, source and date."""

from phalanx.hardware.cluster import Cluster, named_instance, parse_cluster
from phalanx.hardware.cluster_file import read_cluster
from phalanx.hardware.instances import Instance, instance_called, instance_names
from phalanx.hardware.load import machine_names, read_machine
from phalanx.hardware.machine import Figure, Machine
from phalanx.hardware.mixed import Link, MixedCluster, SiteLink
from phalanx.hardware.named import machine_called, machine_named, machines_called

__all__ = [
    "Cluster",
    "Figure",
    "Instance",
    "Link",
    "Machine",
    "MixedCluster",
    "SiteLink",
    "instance_called",
    "instance_names",
    "machine_called",
    "machine_named",
    "machine_names",
    "machines_called",
    "named_instance",
    "parse_cluster",
    "read_cluster",
    "read_machine",
]
