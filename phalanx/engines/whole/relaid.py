"""The layout of a run that goes on with another number of processes. No torch.

A checkpoint is read on any mesh, so the layout is free. The outermost data axis takes what the
other axes leave of the processes; where they leave no whole number, or there is no data axis, the
job is laid out as one that names no mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from phalanx.job import Job
from phalanx.job.sections import PlanSection
from phalanx.planner.training_shape import DATA_AXES

_LAYOUT = ("mesh", "data", "tensor", "context", "pipeline", "stages")


def relaid(job: Job, changes: Mapping[str, Any]) -> tuple[Job, str]:
    """The job on the processes that it is given now, and a sentence where its layout has changed.

    Args:
        job: of a run folder, with the changes.
        changes: keys (dotted) that are set anew; a mesh among them says itself how many processes
            there are, unless these are set too.
    """
    changed = {key.split(".")[1] for key in changes}
    if "mesh" in changed:
        devices = job.plan.devices if "devices" in changed else 0
        return replace(job, plan=replace(job.plan, devices=devices)), ""
    mesh, count = dict(job.plan.mesh), job.plan.devices
    if not mesh or not count or prod(mesh.values()) == count:
        return job, ""
    told = f"note: the layout {_told(mesh)} is for {prod(mesh.values())} processes; on {count} "
    outer = next((axis for axis in mesh if axis in DATA_AXES), None)
    others = prod(size for axis, size in mesh.items() if axis != outer)
    if outer is not None and count % others == 0:
        mesh[outer] = count // others
        return replace(job, plan=replace(job.plan, mesh=mesh)), f"{told}it is {_told(mesh)}"
    default = PlanSection()
    anew = {key: getattr(default, key) for key in _LAYOUT if key not in changed}
    forgotten = {f"plan.{key}" for key in anew}
    origin = {
        key: value
        for key, value in job.origin.items()
        if ".".join(key.split(".")[:2]) not in forgotten
    }
    job = replace(job, plan=replace(job.plan, **anew), origin=origin)
    return job, f"{told}the run is laid out anew"


def _told(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items())
