"""Clusters of several kinds of devices, or of several sites with links between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from math import gcd
from typing import Any

from phalanx.hardware.cluster import Cluster
from phalanx.hardware.machine import OPTIONAL, REQUIRED, Figure, Machine

# of a synchronous step the slowest device counts; of these figures the largest is the worst
_MOST_IS_WORST = ("link_latency", "network_latency", "launch_overhead", "tdp")
_PRICES = ("price", "second_price", "spot_price")


@dataclass(frozen=True, slots=True)
class Link:
    """What joins two parts: per direction, all their devices together."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class SiteLink:
    """A link between two sites, by their names."""

    sites: frozenset[str]
    link: Link


@dataclass(frozen=True)
class MixedCluster:
    """Parts of one kind each, that work together.

    Attributes:
        parts: at least two.
        sites: where each part stands; parts of one site meet over their own networks.
        links: between sites. Traffic of sites without one goes over others.
        name: of the file, or the shorthand.
    """

    parts: tuple[Cluster, ...]
    sites: tuple[str, ...]
    links: tuple[SiteLink, ...] = ()
    name: str = ""

    def __str__(self) -> str:
        return self.name or "+".join(str(part) for part in self.parts)

    @property
    def num_devices(self) -> int:
        """Of all parts."""
        return sum(part.num_devices for part in self.parts)

    @property
    def usd_per_h(self) -> float:
        """Of all devices; infinite where a price is not known."""
        return sum(part.num_devices * part.machine.usd_per_h for part in self.parts)

    def link_between(self, first: int, second: int) -> Link:
        """What joins two parts, by their places in `parts`.

        Inside a site the networks of the part that has less of them; between sites the widest way
        over the links, as far as both parts can fill it.
        """
        ends = [self.parts[first], self.parts[second]]
        own = min(part.num_devices * part.machine.network_bandwidth.value for part in ends)
        latency = max(part.machine.network_latency.value for part in ends)
        if self.sites[first] == self.sites[second]:
            return Link(own, latency)
        wide = widest_ways(self.links)[frozenset((self.sites[first], self.sites[second]))]
        return Link(min(own, wide.bytes_per_s), latency + wide.latency_s)

    def slowest_link(self) -> Link:
        """The least rate and the largest latency between any two parts."""
        links = [self.link_between(i, j) for i, j in combinations(range(len(self.parts)), 2)]
        return Link(min(x.bytes_per_s for x in links), max(x.latency_s for x in links))

    def as_one(self) -> Cluster:
        """A cluster of one kind that is never faster than this one in a synchronous step.

        Every figure is the worst of the parts (the slowest device, the smallest memory), the
        network is a device's share of the slowest link between parts, and the price is the mean.
        """
        machines = [part.machine for part in self.parts]
        changes: dict[str, Any] = {
            name: _worst(name, machines) for name in REQUIRED | OPTIONAL if name not in _PRICES
        }
        changes |= {name: self._mean(name) for name in _PRICES}
        for name in ("vendor", "generation", "topology"):
            texts = {getattr(machine, name) for machine in machines}
            changes[name] = texts.pop() if len(texts) == 1 else ""
        if not all(machine.has_bf16 for machine in machines):
            changes["half_precision"] = "fp16"
        slowest, network = self.slowest_link(), changes["network_bandwidth"]
        share = slowest.bytes_per_s / min(part.num_devices for part in self.parts)
        if share < network.value:
            source = "a device's share of the slowest link between the parts"
            changes["network_bandwidth"] = Figure(share, "formula", source, network.date)
        source = "of the slowest link between the parts"
        changes["network_latency"] = Figure(slowest.latency_s, "formula", source, network.date)
        machine = replace(
            machines[0],
            name=self.name or "+".join(machine.name for machine in machines),
            title=" and ".join(dict.fromkeys(machine.title for machine in machines)),
            devices_per_domain=gcd(*(_domain(part) for part in self.parts)),
            cores_per_device=min(machine.cores_per_device for machine in machines),
            **changes,
        )
        return Cluster(machine, self.num_devices)

    def _mean(self, name: str) -> Figure | None:
        found = [(getattr(part.machine, name), part.num_devices) for part in self.parts]
        if any(figure is None for figure, _ in found):
            return None
        total = sum(figure.value * count for figure, count in found)
        source = "mean of the parts; " + "; ".join(dict.fromkeys(f.source for f, _ in found))
        return Figure(total / self.num_devices, "formula", source, found[0][0].date)

    def to_dict(self) -> dict[str, Any]:
        """What a plan remembers of it."""
        parts = [part.to_dict() | {"site": site} for part, site in zip(self.parts, self.sites)]
        return {"parts": parts, "num_devices": self.num_devices}


def _domain(part: Cluster) -> int:
    return min(part.machine.devices_per_domain, part.num_devices)


def _worst(name: str, machines: list[Machine]) -> Figure | None:
    """The figure that holds back a step that all take together; None if one is not known."""
    if name == "usable_memory_frac":  # that of the device with the least room
        return min(machines, key=lambda machine: machine.usable_bytes).usable_memory_frac
    if name == "memory":
        return min(machines, key=lambda machine: machine.usable_bytes).memory
    figures = [getattr(machine, name) for machine in machines]
    if any(figure is None for figure in figures):
        return None
    chosen: Figure = (max if name in _MOST_IS_WORST else min)(
        figures, key=lambda figure: figure.value
    )
    return chosen


def widest_ways(links: tuple[SiteLink, ...]) -> dict[frozenset[str], Link]:
    """(site, site) -> the way between them with the most bytes per second, then the least time."""
    sites = sorted({site for each in links for site in each.sites})
    ways = {each.sites: each.link for each in links}
    for through in sites:  # as Floyd and Warshall, for the narrowest link of a way
        for one, two in combinations(sites, 2):
            first = ways.get(frozenset((one, through)))
            second = ways.get(frozenset((through, two)))
            if first is None or second is None or through in (one, two):
                continue
            narrowest = min(first.bytes_per_s, second.bytes_per_s)
            way = Link(narrowest, first.latency_s + second.latency_s)
            known = ways.get(frozenset((one, two)))
            if known is None or (way.bytes_per_s, -way.latency_s) > (
                known.bytes_per_s,
                -known.latency_s,
            ):
                ways[frozenset((one, two))] = way
    return ways
