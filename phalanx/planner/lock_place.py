"""Which devices a lockfile is for, in words that its reader compares with its own machine."""

from __future__ import annotations

from typing import Any

from phalanx.hardware import Cluster, machine_called
from phalanx.job import Job
from phalanx.plan import Plan
from phalanx.planner.feedback import is_device
from phalanx.planner.machine_here import device_here, hardware_here


def is_here(cluster: Cluster) -> bool:
    """Whether its devices are those of this machine."""
    return is_device(str(hardware_here(1)["machine"]), cluster.machine)


def device_of(cluster: Cluster) -> str:
    """ "cpu", "cuda" or "tpu"."""
    if is_here(cluster):
        return device_here()
    return "tpu" if cluster.machine.cores_per_device else "cuda"


def hardware_of(cluster: Cluster) -> dict[str, Any]:
    """As `require_place` compares it: this machine's device by the name that it gives itself."""
    table = dict(cluster.to_dict())
    return table | hardware_here(cluster.num_devices) if is_here(cluster) else table


def require_place(plan: Plan, num_devices: int, job: Job | None = None) -> None:
    """Refuse a plan that was made for other devices, other libraries or another job.

    Args:
        num_devices: that will be used here.
        job: that is about to run; None: there is none.

    Raises:
        PlanError: as `Plan.require_here`.
    """
    here = hardware_here(num_devices)
    if plan.hardware["machine"] != here["machine"]:
        called = machine_called(str(here["machine"]).split(",")[0])
        here |= {"machine": called.name} if called is not None else {}
    plan.require_here(here, job)
