"""Energy of a run, from the power that devices are built for and the share of it that they draw."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.cost.bars import Bar
from phalanx.hardware import Cluster

_W_PER_KW = 1000.0
# share of TDP. Serving: median and 5th to 95th percentile of 38 profiles of A100 80 GB (Splitwise,
# ISCA 2024). Training: assumption, products and exchanges in turn keep devices near their limit.
_DRAWN = {"serve": Bar(0.61, 0.17, 0.76), "train": Bar(0.85, 0.65, 1.0)}
# devices -> the whole hall, with hosts, network and cooling. high: InferenceX (2026-04) counts 1.73
# kW for an H100 of 0.7 kW; low: assumption, hosts alone
_HALL = Bar(1.7, 1.3, 1.73 / 0.7)


@dataclass(frozen=True, slots=True)
class Energy:
    """What a run draws.

    Attributes:
        devices_kwh: of the accelerators alone.
        hall_kwh: with hosts, network and cooling.
    """

    devices_kwh: Bar
    hall_kwh: Bar


def energy_of(cluster: Cluster, hours: Bar, what: str) -> Energy | None:
    """Energy of a cluster over hours; None where its machine's power is not known.

    Args:
        hours: with their bar.
        what: "train" or "serve".
    """
    tdp = cluster.machine.tdp
    if tdp is None:
        return None
    kilowatts = cluster.num_devices * tdp.value / _W_PER_KW
    devices = Bar(*(kilowatts * each * share for each, share in zip(hours, _DRAWN[what])))
    return Energy(devices, Bar(*(kwh * over for kwh, over in zip(devices, _HALL))))
