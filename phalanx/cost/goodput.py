"""What failures, checkpoints and restarts leave of the time that is paid for.

Symbols: M mean time between interruptions of the whole job, D seconds that a checkpoint stops
training, R seconds from an interruption to the next step, t seconds of training between
checkpoints. Interruptions come at a constant rate and may come during checkpoints and restarts; an
interruption loses the work since the last checkpoint.

    goodput(t)  = t / (M exp(R / M) (exp((t + D) / M) - 1))        Daly 2006, eq. 20, solved for it
    best t      = sqrt(2 D M) (1 + sqrt(D / 2M) / 3 + D / 18M) - D   for D < 2M, else M; eq. 37

Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
FGCS 22 (2006). Differences: none in the formulas; rates have bars, and all interruptions are alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.cost.bars import Bar
from phalanx.cost.energy import Energy, energy_of
from phalanx.cost.money import Rental, rentals
from phalanx.errors import JobError
from phalanx.hardware import Cluster

_HOUR_S = 3600.0
_MONTH_S = 30 * 86400.0
_LARGEST_EXPONENT = 700.0  # beyond, the exponential is no finite float
_NO_PROGRESS_FRAC = 1e-3  # a run of which less trains has no end
_DEVICE_MTBF_S = Bar(16384 * 54 * 86400.0 / 419, 100_000 * 18 * 60.0, 1000 * 8 * 86400.0 / 2.3)
_RESTART_S = Bar(600.0, 180.0, 950.0)
_SPOT_INSTANCE_MTBF_S = Bar(_MONTH_S / 0.175, 86400.0, _MONTH_S / 0.10)
_SPOT_WAIT_S = Bar(1200.0, 120.0, 3600.0)


@dataclass(frozen=True, kw_only=True)
class Failures:
    """How often devices fail, and what that costs.

    Attributes:
        device_mtbf_s: of one device, with its share of host and network. The Llama 3 report
            (arXiv 2407.21783, section 3.3.4) counts 419 unexpected interruptions in 54 days on
            16,384 H100. Bars: 2.3 in a day on 1,000 servers of 8, and one in 18 minutes on 100,000
            devices (FT-HSDP, arXiv 2602.00277).
        restart_s: detection, scheduling, loading, first step. 10 minutes at 100,000 devices
            (FT-HSDP); bars from its items without scheduling and first step, and from torchft's
            slowest report (948 s).
        spot_instance_mtbf_s: between two times that a provider takes an instance of 8 back. 15 to
            20 % of p5 instances in a month (AWS Spot Instance Advisor, 2026-02); low: one a day, as
            long as preemptible machines of Google Cloud may live.
        spot_wait_s: until there is another instance, on top of a restart. assumption: minutes to
            an hour.
        checkpoint_bytes_per_s: that a device writes. assumption: 8 devices share 2 GB/s of local
            disks; Llama 3's storage held 2 TB/s, 0.12 GB/s a device.
    """

    device_mtbf_s: Bar = _DEVICE_MTBF_S
    restart_s: Bar = _RESTART_S
    spot_instance_mtbf_s: Bar = _SPOT_INSTANCE_MTBF_S
    spot_wait_s: Bar = _SPOT_WAIT_S
    checkpoint_bytes_per_s: float = 0.25e9
    devices_per_instance: int = 8

    def __post_init__(self) -> None:
        for name in ("device_mtbf_s", "restart_s", "spot_instance_mtbf_s", "spot_wait_s"):
            bar: Bar = getattr(self, name)
            least = 0.0 if name in ("restart_s", "spot_wait_s") else math.ulp(0.0)
            if not (least <= bar.low <= bar.value <= bar.high < math.inf):
                rule = "must be low <= value <= high, finite, and a time"
                raise JobError("job/bad-value", f"failures.{name}", str(tuple(bar)), rule)
        if not 0.0 < self.checkpoint_bytes_per_s < math.inf:
            where, rate = "failures.checkpoint_bytes_per_s", self.checkpoint_bytes_per_s
            raise JobError("job/bad-value", where, rate, "must be above 0 and finite")

    def job_mtbf_s(self, num_devices: int, terms: str) -> Bar:
        """Between two interruptions of a job that needs all its devices."""
        own = self.device_mtbf_s * (1.0 / num_devices)
        if terms != "spot":
            return own
        instances = math.ceil(num_devices / self.devices_per_instance)
        spot = self.spot_instance_mtbf_s * (1.0 / instances)
        return Bar(*(1.0 / (1.0 / mine + 1.0 / taken) for mine, taken in zip(own, spot)))

    def downtime_s(self, terms: str) -> Bar:
        """Of one interruption. On spot terms a lost instance has to be replaced first."""
        if terms != "spot":
            return self.restart_s
        return Bar(*(restart + wait for restart, wait in zip(self.restart_s, self.spot_wait_s)))

    def checkpoint_stop_s(self, checkpoint_bytes: float, num_devices: int) -> float:
        """Seconds that a checkpoint of so many bytes stops training, at least 1."""
        return max(1.0, checkpoint_bytes / (num_devices * self.checkpoint_bytes_per_s))


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """A training run with what interrupts it, rented in one way.

    Attributes:
        rental: terms and price.
        goodput_frac: share of the time that trains, with its bar.
        interval_s: training between checkpoints.
        interruptions: expected number.
        hours: from start to end; infinite where interruptions come too fast for any progress.
        usd: of these hours.
        energy: of these hours; None where the power of the machine is not known.
    """

    rental: Rental
    goodput_frac: Bar
    interval_s: float
    interruptions: float
    hours: Bar
    usd: Bar
    energy: Energy | None = field(default=None)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; bars as [value, low, high], None for what has no end."""
        return {
            "terms": self.rental.terms,
            "usd_per_h": self.rental.usd_per_h,
            "price_source": self.rental.source,
            "goodput_frac": list(self.goodput_frac),
            "checkpoint_interval_s": self.interval_s,
            "interruptions": self.interruptions,
            "hours": _finite(self.hours),
            "usd": _finite(self.usd),
            "energy_kwh": _finite(self.energy.devices_kwh) if self.energy else None,
            "hall_energy_kwh": _finite(self.energy.hall_kwh) if self.energy else None,
        }

    def describe(self) -> str:
        """One line."""
        return (
            f"{self.rental.terms}: {self.goodput_frac.value:.1%} of the time trains "
            f"({self.goodput_frac.low:.1%} to {self.goodput_frac.high:.1%}), "
            f"{self.interruptions:.3g} interruptions, a checkpoint every "
            f"{self.interval_s / 60:.3g} min; {self.rental.source}"
        )


def best_interval_s(mtbf_s: float, checkpoint_s: float) -> float:
    """Training between two checkpoints that keeps most of the time (Daly 2006, eq. 37)."""
    if checkpoint_s >= 2.0 * mtbf_s:
        return mtbf_s
    share = checkpoint_s / (2.0 * mtbf_s)
    root = math.sqrt(2.0 * checkpoint_s * mtbf_s)
    return root * (1.0 + math.sqrt(share) / 3.0 + share / 9.0) - checkpoint_s


def goodput_frac(mtbf_s: float, checkpoint_s: float, restart_s: float, interval_s: float) -> float:
    """Share of the time that trains; 0 where no interval ends before the next interruption.

    Args:
        mtbf_s: between interruptions of the job.
        checkpoint_s: that a checkpoint stops training.
        restart_s: from an interruption to the next step.
        interval_s: training between checkpoints, above 0.
    """
    lost = (interval_s + checkpoint_s) / mtbf_s
    down = restart_s / mtbf_s
    if lost + down > _LARGEST_EXPONENT:
        return 0.0
    return interval_s / (mtbf_s * math.exp(down) * math.expm1(lost))


def run_costs(
    cluster: Cluster,
    train_hours: Bar,
    *,
    checkpoint_bytes: float,
    interval_s: float = 0.0,
    failures: Failures | None = None,
) -> Sequence[RunCost]:
    """A run in every way that its cluster can be rented; none where no price is known.

    Args:
        train_hours: of steps alone, with its bar.
        checkpoint_bytes: of one checkpoint, all devices together.
        interval_s: training between checkpoints (0: the best for each rate of the bar).
    """
    failures = failures or Failures()
    return [
        _run_cost(cluster, train_hours, rental, checkpoint_bytes, interval_s, failures)
        for rental in rentals(cluster)
    ]


def _run_cost(
    cluster: Cluster,
    train_hours: Bar,
    rental: Rental,
    checkpoint_bytes: float,
    interval_s: float,
    failures: Failures,
) -> RunCost:
    devices = cluster.num_devices
    mtbf = failures.job_mtbf_s(devices, rental.terms)
    down = failures.downtime_s(rental.terms)
    stop_s = failures.checkpoint_stop_s(checkpoint_bytes, devices)

    def interval(mtbf_s: float) -> float:
        return interval_s or min(best_interval_s(mtbf_s, stop_s), train_hours.high * _HOUR_S)

    frac = Bar(
        *(
            goodput_frac(mtbf_s, stop_s, down_s, interval(mtbf_s))
            for mtbf_s, down_s in zip(mtbf, (down.value, down.high, down.low))
        )
    )
    hours = Bar(
        _over(train_hours.value, frac.value),
        _over(train_hours.low, frac.high),
        _over(train_hours.high, frac.low),
    )
    return RunCost(
        rental=rental,
        goodput_frac=frac,
        interval_s=interval(mtbf.value),
        interruptions=hours.value * _HOUR_S / mtbf.value,
        hours=hours,
        usd=hours * rental.usd_per_h,
        energy=energy_of(cluster, hours, "train"),
    )


def _finite(bar: Bar) -> list[float | None]:
    return [each if math.isfinite(each) else None for each in bar]


def _over(hours: float, frac: float) -> float:
    return hours / frac if frac >= _NO_PROGRESS_FRAC else math.inf
