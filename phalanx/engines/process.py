"""One process of a role: its rank, device, mesh and memory, read once.

The environment is torchrun's (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT), so torchrun, Slurm and Kubernetes launchers all do.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh

from phalanx.engines.launch import KERNEL_CACHE, RESOLVER
from phalanx.engines.memory import process_bytes, restart_peak, return_large_blocks
from phalanx.engines.watch import Watch
from phalanx.errors import PlanError
from phalanx.mesh import Mesh
from phalanx.worlds.logged_group import device_mesh, init_logged

_starts = itertools.count()  # ranks of one job start in step
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@dataclass(frozen=True)
class Process:
    """This process.

    Attributes:
        rank, world_size: in the role's mesh.
        device: where tensors live.
        mesh: torch's mesh with the plan's axes.
    """

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes files and reports."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def sum(self, value: float) -> float:
        """`value` added over all ranks; waits, so not for the step path."""
        total = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total[0])

    def mean(self, value: float) -> float:
        """`value` averaged over all ranks; waits."""
        return self.sum(value) / self.world_size


@contextmanager
def start_process(
    device: str, mesh: Mesh, timeout_s: float = 600.0, *, watch: Watch | None = None
) -> Iterator[Process]:
    """Join the other processes; leave them at the end.

    A default process group that exists already is used and left alone.

    Args:
        device: "cpu" (gloo) or "cuda" (NCCL, gloo for host tensors).
        mesh: axes of the role; must multiply to WORLD_SIZE.
        timeout_s: of a collective.
        watch: told of an error before this process leaves the others, whom that disturbs.

    Raises:
        JobError: `mesh/product` when WORLD_SIZE differs from the mesh.
        PlanError: `plan/hardware` when this process sees no GPU of its own.
    """
    mesh.require_devices(int(os.environ.get("WORLD_SIZE", mesh.size)), "plan.mesh")
    where = device_here(device, int(os.environ.get("LOCAL_RANK", 0)))
    if where.type == "cuda":
        torch.cuda.set_device(where)
    for name, value in (KERNEL_CACHE | RESOLVER).items():
        os.environ.setdefault(name, value)
    owns = not dist.is_initialized()
    if owns:
        return_large_blocks()
        torch.set_num_threads(_num_threads())
        # a group of its own each time, as the store outlives it
        store = dist.PrefixStore(f"start{next(_starts)}", open_store())
        init_logged(BACKENDS[device], store, *rank_here(), timeout_s)
    try:
        yield Process(dist.get_rank(), dist.get_world_size(), where, device_mesh(device, mesh))
    except BaseException as error:
        if watch is not None:
            watch.failed(error)
        raise
    finally:
        if owns:
            dist.destroy_process_group()


def device_here(device: str, local_rank: int) -> torch.device:
    """The device of a process; on CUDA the GPU of its number, or the only one that it is shown, as
    by `srun --gpus-per-task=1`.

    Raises:
        PlanError: `plan/hardware` for fewer GPUs than that.
    """
    if device != "cuda":
        return torch.device(device)
    num_gpus = torch.cuda.device_count()
    if local_rank >= num_gpus and num_gpus != 1:
        rule = f"process {local_rank} of this host sees {num_gpus} GPUs, and none is its own"
        legal = [f"{num_gpus} processes a host"] if num_gpus else ["cpu"]
        raise PlanError("plan/hardware", "device", device, rule, legal=legal)
    return torch.device(device, local_rank if num_gpus > 1 else 0)


def rank_here() -> tuple[int, int]:
    """(rank, number of ranks) of this process, also before it joins the others."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def open_store() -> dist.Store:
    """Where the ranks meet; one for the life of this process, as rank 0 may keep it."""
    if "RANK" not in os.environ:
        return dist.HashStore()
    return _store_at(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], os.environ["RANK"])


@cache
def _store_at(address: str, port: str, rank: str) -> dist.Store:
    store, _, _ = next(dist.rendezvous("env://"))
    return store


def _num_threads() -> int:
    """Cores per process of this machine; torchrun's default of one thread wastes the others."""
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def resident_bytes() -> int:
    """Memory of this process now; pages that it shares count by their share (PSS)."""
    return process_bytes().pss


class PeakMemory:
    """The largest memory of a stretch of work, above a level noted before.

    On the CPU: PSS, from the kernel's own high-water mark, which costs nothing to keep. On CUDA:
    bytes that torch allocated.

    Args:
        device: whose memory counts.
        baseline_bytes: level to subtract on the CPU, `resident_bytes()` after the imports.
    """

    def __init__(self, device: torch.device, baseline_bytes: int) -> None:
        self.device = device
        self.baseline_bytes = baseline_bytes if device.type == "cpu" else 0
        self.restart()

    def restart(self) -> None:
        """The stretch begins now."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            restart_peak()
            self.peak_bytes()

    def peak_bytes(self) -> int:
        """The largest level since, less the baseline; takes milliseconds on the CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        now = process_bytes()
        self._shared_bytes = now.rss - now.pss
        return now.peak_pss - self.baseline_bytes

    def peak_so_far(self) -> int:
        """As `peak_bytes`, cheaply: as if as much were shared as when that was asked last."""
        if self.device.type == "cuda":
            return self.peak_bytes()
        return peak_resident_bytes() - self._shared_bytes - self.baseline_bytes


def peak_resident_bytes() -> int:
    """The kernel's high-water mark of this process (RSS), see proc(5)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status has no VmHWM")
