"""This machine as a place for processes: its devices, its memory, what a plan remembers of it."""

from __future__ import annotations

import os
import re
from functools import cache
from typing import Any

from phalanx.doctor.machine import gpus, memory_bytes, num_cores, processor_name
from phalanx.job import Job
from phalanx.mesh import Mesh

_MEBIBYTES = re.compile(r"(\d+) MiB")


@cache
def gpus_here() -> tuple[str, ...]:
    """Names of the NVIDIA GPUs that processes of this one may use (CUDA_VISIBLE_DEVICES)."""
    found = [line for line in gpus() if "AMD" not in line]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(found)
    chosen = [each for each in visible.split(",") if each.strip() not in ("", "-1", "NoDevFiles")]
    return tuple(found[: len(chosen)])


def device_here() -> str:
    """What training runs on: "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if gpus_here() else "cpu"


def num_ranks_here(job: Job) -> int:
    """Processes of the training role: as the job's mesh or devices say, else one per GPU, or per
    core where there is none."""
    mesh = Mesh(dict(job.plan.mesh))
    return job.plan.devices or (mesh.size if job.plan.mesh else len(gpus_here()) or num_cores())


def hardware_here(num_ranks: int) -> dict[str, Any]:
    """What a plan remembers of this machine."""
    machine = gpus_here()[0] if gpus_here() else processor_name()
    return {"machine": machine, "num_devices": num_ranks, "cores": num_cores()}


def memory_of_rank(num_ranks: int) -> float:
    """Bytes of a GPU, or of this machine over its ranks."""
    sizes = [float(found[1]) for gpu in gpus_here() if (found := _MEBIBYTES.search(gpu))]
    return min(sizes) * 2**20 if sizes else memory_bytes()[0] / num_ranks
