"""Clusters from files, and from shorthand of several parts such as "8xh100+8xa100-80g".

A cluster file has groups of devices and links between their sites:

    [[groups]]
    site = "paris"
    machine = "h100"            # a name, or a machine file, beside this one
    devices = 64
    devices_per_node = 8        # optional: devices that share the fast links (72 of an NVL72)
    network_bandwidth = "400 Gbit/s"  # optional, of one device
    price = "2.5 $/h"           # optional, of one device; the machine's other prices then drop out

    [[links]]
    between = ["paris", "oslo"]
    bandwidth = "100 Gbit/s"    # per direction, of the whole link
    latency = "20 ms"
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from phalanx.errors import JobError, shown
from phalanx.hardware.cluster import Cluster, parse_cluster
from phalanx.hardware.load import MAX_DEVICES, read_machine
from phalanx.hardware.machine import Figure
from phalanx.hardware.mixed import Link, MixedCluster, SiteLink, widest_ways
from phalanx.strict import parse_toml, read_record, read_value
from phalanx.units import parse_quantity

_PART = re.compile(r"\s*\+\s*(?=[0-9]+\s*[xX*])")  # every further part has a count
MOST_PARTS = 64


@dataclass(frozen=True)
class _Group:
    machine: str
    devices: int = field(metadata={"low": 1, "high": MAX_DEVICES})
    site: str = "here"
    devices_per_node: int = field(default=0, metadata={"low": 1})
    network_bandwidth: str | float | None = None
    price: str | float | None = None


@dataclass(frozen=True)
class _SiteLink:
    between: tuple[str, str]
    bandwidth: str | float
    latency: str | float = 0.0


@dataclass(frozen=True)
class _File:
    groups: Sequence[_Group]
    links: Sequence[_SiteLink] = ()


def read_cluster(text: str) -> Cluster | MixedCluster:
    """A cluster by its shorthand or by the path of a cluster or machine file.

    "8xh100+8xa100-80g" are two kinds in one place; other forms as `parse_cluster`.

    Raises:
        JobError: as `parse_cluster` and `read_machine`; `job/bad-value` for one kind named twice, a
            group that is no whole number of nodes, a link without bandwidth, between unknown or
            equal sites or given twice, sites that no link joins, and a price that is no number.
    """
    text = text.strip()
    parts = _PART.split(text)
    if len(parts) > 1:
        return _joined(text, [parse_cluster(part) for part in parts])
    if text.endswith(".toml") and (table := _cluster_table(Path(text))):
        return _of_file(table, Path(text))
    return parse_cluster(text)


def _joined(text: str, parts: list[Cluster]) -> MixedCluster:
    kinds: dict[str, Cluster] = {}
    for part in parts:
        name = part.machine.name
        if name in kinds:
            rule, total = "names one kind twice", kinds[name].num_devices + part.num_devices
            raise JobError("job/bad-value", "cluster", shown(text), rule, legal=[f"{total}x{name}"])
        kinds[name] = part
    _require_size(parts, "cluster")
    return MixedCluster(tuple(parts), ("here",) * len(parts))


def _cluster_table(path: Path) -> dict[str, Any] | None:
    """What a cluster file holds; None for another file, which a machine's reader judges."""
    try:
        content = path.read_bytes()
    except (OSError, ValueError):  # ValueError: a path with a NUL
        return None
    table = parse_toml(content, str(path))
    return table if "groups" in table else None


def _of_file(table: dict[str, Any], path: Path) -> Cluster | MixedCluster:
    file: _File = read_record(_File, table, f"{path.name}: ")
    if not file.groups:
        raise JobError("job/bad-value", f"{path.name}: groups", "[]", "must have a group")
    parts = [
        _part(group, path.parent, f"{path.name}: groups[{at}]")
        for at, group in enumerate(file.groups)
    ]
    sites = tuple(group.site for group in file.groups)
    _require_size(parts, f"{path.name}: groups")
    seen: set[tuple[str, str]] = set()
    for at, key in enumerate((g.site, p.machine.name) for g, p in zip(file.groups, parts)):
        if key in seen:
            rule = f"names {key[1]} at site {key[0]!r} twice"
            raise JobError("job/bad-value", f"{path.name}: groups[{at}]", None, rule)
        seen.add(key)
    links = _links(file.links, sites, path)
    if len(parts) == 1:
        return parts[0]
    return MixedCluster(tuple(parts), sites, links, name=path.stem)


def _part(group: _Group, folder: Path, where: str) -> Cluster:
    is_file = group.machine.endswith(".toml")
    machine = read_machine(str(folder / group.machine) if is_file else group.machine)
    changes: dict[str, Any] = {}
    node = group.devices_per_node
    if node:
        if group.devices % node:
            near = [max(1, group.devices // node) * node]
            rule = f"is no whole number of nodes of {node}"
            raise JobError("job/bad-value", f"{where}.devices", group.devices, rule, legal=near)
        if node != machine.devices_per_domain:
            changes["devices_per_domain"] = node
    for name, dimension in (("network_bandwidth", "bytes_per_s"), ("price", "usd_per_h")):
        given = getattr(group, name)
        if given is not None:
            value = _amount(given, dimension, f"{where}.{name}")
            changes[name] = Figure(value, "published", f"the cluster file, {where}", "")
    if "price" in changes:  # what others ask for the machine does not count beside it
        changes |= {"second_price": None, "spot_price": None}
        changes |= {"price_terms": "", "second_price_terms": ""}
    if changes:
        machine = replace(machine, **changes)
    return Cluster(machine, group.devices)


def _links(given: Sequence[_SiteLink], sites: Sequence[str], path: Path) -> tuple[SiteLink, ...]:
    links: dict[frozenset[str], SiteLink] = {}
    for at, each in enumerate(given):
        where, ends = f"{path.name}: links[{at}]", frozenset(each.between)
        for site in each.between:
            if site not in sites:
                raise JobError("job/bad-value", f"{where}.between", shown(site), "no such site",
                               legal=sorted(set(sites)))  # fmt: skip
        if len(ends) < 2 or ends in links:
            rule = "joins two sites that are joined already" if ends in links else "joins one site"
            raise JobError("job/bad-value", f"{where}.between", shown(list(each.between)), rule)
        rate = _amount(each.bandwidth, "bytes_per_s", f"{where}.bandwidth")
        latency = _amount(each.latency, "s", f"{where}.latency", may_be_zero=True)
        links[ends] = SiteLink(ends, Link(rate, latency))
    found = tuple(links.values())
    ways = widest_ways(found)
    for pair in combinations(sorted(set(sites)), 2):
        if frozenset(pair) not in ways:
            rule = f"no link joins {pair[0]!r} and {pair[1]!r}, nor do links over other sites"
            raise JobError("job/missing", f"{path.name}: links", None, rule)
    return found


def _amount(text: Any, dimension: str, where: str, *, may_be_zero: bool = False) -> float:
    value: float = read_value(parse_quantity(text, dimension, where), float, where)
    if value < 0.0 or (value == 0.0 and not may_be_zero):
        rule = "must be at least 0" if may_be_zero else "must be above 0"
        raise JobError("job/bad-value", where, shown(text), rule)
    return value


def _require_size(parts: Sequence[Cluster], where: str) -> None:
    total = sum(part.num_devices for part in parts)
    if total > MAX_DEVICES or len(parts) > MOST_PARTS:
        rule = f"must have at most {MAX_DEVICES:,} devices in {MOST_PARTS} parts"
        raise JobError("job/bad-value", where, total, rule)
