"""Clusters as a user names them: "2xH100,8xH100,v5p-8"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import JobError
from phalanx.hardware import (
    Cluster,
    MixedCluster,
    machine_called,
    machine_named,
    machine_names,
    named_instance,
    read_cluster,
    read_machine,
)

MOST_CLUSTERS = 32
_COUNTED = re.compile(r"(?:(\d{1,8})[x*])?([^+@]+)", re.IGNORECASE | re.ASCII)
HERE_FILE = "here.toml"  # of the current folder: this machine, as `phalanx lab calibrate` wrote it


@dataclass(frozen=True)
class AskedCluster:
    """A cluster and what the user called it.

    Attributes:
        cluster: its devices; of a mixed one all of them, each as slow as the slowest
            (`MixedCluster.as_one`).
        note: how the name was read, where that is not plain.
        mixed: its parts, where they are of several kinds or sites.
    """

    text: str
    cluster: Cluster
    note: str = ""
    mixed: MixedCluster | None = None


def asked_clusters(text: str) -> list[AskedCluster]:
    """Clusters separated by commas; "here" is the machine of `here.toml` with all its devices.

    Raises:
        JobError: `job/bad-value` for an empty or a very long list, one named twice, and "here"
            where this machine was not measured; from `read_cluster`.
    """
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(names) > MOST_CLUSTERS:
        rule = f"must be 1 to {MOST_CLUSTERS} clusters separated by commas"
        raise JobError(
            "job/bad-value", "--on", repr(text[:60]), rule, legal=["2xh100,8xh100,v5p-8"]
        )
    found: dict[Cluster, AskedCluster] = {}
    for name in names:
        if name.lower() == "here":
            read: Cluster | MixedCluster = _this_machine()
        else:
            read = _read(name)
        mixed = read if isinstance(read, MixedCluster) else None
        cluster = read.as_one() if isinstance(read, MixedCluster) else read
        if cluster in found:
            rule = f"is the same as {found[cluster].text}"
            raise JobError("job/bad-value", "--on", name, rule)
        notes = (
            [_mixed_note(mixed)] if mixed else [_note(name, cluster) or _read_note(name, cluster)]
        )
        if name.lower() == "here":
            notes = [f"all of {HERE_FILE}, measured on {cluster.machine.matmul.date}"]
        notes.append(_half_note(name, cluster))
        found[cluster] = AskedCluster(name, cluster, "; ".join(filter(None, notes)), mixed)
    return list(found.values())


def _read(name: str) -> Cluster | MixedCluster:
    """A cluster by its own name, or of a kind as people call it: "8xA100", "a6000"."""
    try:
        return read_cluster(name)
    except JobError as error:
        called = _COUNTED.fullmatch(name)
        counted = called is not None and called[1] is not None
        machine = (machine_called if counted else machine_named)(called[2]) if called else None
        is_name = error.code in ("registry/unknown", "job/bad-value")
        if not is_name or called is None or machine is None:
            raise
        return read_cluster(f"{called[1] or 1}x{machine.name}")


def _read_note(name: str, cluster: Cluster) -> str:
    """Of a kind with another name here: what it was taken for, and what it may have been."""
    called = _COUNTED.fullmatch(name)
    own = cluster.machine.name
    if called is None or called[2].endswith(".toml") or called[2].strip().lower() == own:
        return ""
    stem = called[2].strip().lower()
    if instance := named_instance(stem):
        hosts = cluster.num_devices // instance.devices
        rate = cluster.machine.network_bandwidth.value * 8 / 1e9
        between = f", {rate:.4g} Gbit/s a device between them"
        if cluster.machine.devices_per_domain > instance.devices:  # fast links span hosts
            between = ""
        where = f" on {hosts} hosts of {instance.devices}{between}" if hosts > 1 else ""
        return f"{name} is {cluster}{where}; the price is the machine's, whoever rents it out"
    others = [each for each in machine_names() if each.startswith(stem) and each != own]
    also = f"; there are {', '.join(others)} as well" if others else ""
    return f"{name} is read as {cluster}{also}"


def _this_machine() -> Cluster:
    if not Path(HERE_FILE).is_file():
        rule = f"there is no {HERE_FILE}; measure this machine first (`phalanx run` does so itself)"
        legal = [f"phalanx lab calibrate -o {HERE_FILE}", "8xh100"]
        raise JobError("job/bad-value", "plan.on", "here", rule, legal=legal)
    machine = read_machine(HERE_FILE)
    return Cluster(machine, machine.devices_per_domain)


def _note(name: str, cluster: Cluster) -> str:
    cores, machine = cluster.machine.cores_per_device, cluster.machine.name
    if not cores:
        return ""
    is_slice = "-" in name and name.lower().startswith(f"{machine}-")
    counts = f" counts TensorCores, {cores} to a chip: {cluster.num_devices} chips"
    slice_note = f"{counts};" if is_slice and cores > 1 else ":"
    return f"{name}{slice_note} a price to compare with, Phalanx itself does not run on TPUs"


def _half_note(name: str, cluster: Cluster) -> str:
    if cluster.machine.has_bf16:
        return ""
    return (
        f"{name} has no bf16 units: products of 16 bits are priced in fp16. In bfloat16, as "
        "Phalanx trains and serves, they run at an eighth or less of that (torch on V100, RTX 2080)"
    )


def _mixed_note(mixed: MixedCluster) -> str:
    link = mixed.slowest_link()
    parts = " and ".join(
        f"{part} at {site}" if len(set(mixed.sites)) > 1 else str(part)
        for part, site in zip(mixed.parts, mixed.sites)
    )
    return (
        f"{parts}: a step waits for the slowest device, the smallest memory and the slowest link "
        f"({link.bytes_per_s * 8 / 1e9:.4g} Gbit/s, {link.latency_s * 1e3:.3g} ms)"
    )
