"""Dollars of training and serving, from hours and prices per hour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.hardware import Cluster, Figure

MILLION = 1e6


def run_usd(hours: float, usd_per_h: float) -> float:
    """What a machine costs for so long."""
    return hours * usd_per_h


def million_tokens_usd(usd_per_h: float, tokens_per_s: float) -> float:
    """What a million tokens cost on a machine that makes so many a second."""
    return usd_per_h / (tokens_per_s * 3600.0) * MILLION


def train_and_serve_usd(
    train_hours: float, train_usd_per_h: float, serve_hours: float, serve_usd_per_h: float
) -> float:
    """A training run and so many hours of serving its result."""
    return run_usd(train_hours, train_usd_per_h) + run_usd(serve_hours, serve_usd_per_h)


@dataclass(frozen=True, slots=True)
class Rental:
    """A way to rent a cluster.

    Attributes:
        terms: "on demand", "reserved", "estimate" or "spot"; devices on spot terms may be taken
            away.
        usd_per_h: of all devices.
        source: provider, and date of the price.
    """

    terms: str
    usd_per_h: float
    source: str


def rentals(cluster: Cluster) -> Sequence[Rental]:
    """All ways to rent a cluster that its machine has a price for; none where none is known."""
    machine = cluster.machine
    offers: list[tuple[str, Figure | None]] = [
        (machine.price_terms or "on demand", machine.price),
        (machine.second_price_terms or "on demand", machine.second_price),
        ("spot", machine.spot_price),
    ]
    return [
        Rental(terms, cluster.num_devices * price.value, f"{price.source} ({price.date})")
        for terms, price in offers
        if price
    ]
