"""A process that measures what a device of this machine gives, as `engines.machine_file` asks.

A device is a process with its threads, or a GPU. All measure at the same time, so that cores,
memory and links are shared as they will be in training. On a CPU the clock is processor time: what
a process gets while it has its cores, which `cores_frac` says how much of the time was.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

from phalanx.engines.process import Process, start_process
from phalanx.mesh import Mesh

_WEIGHTS = 6
_FEWEST = 5
_SMALL_CALLS = 500  # of one measurement of the overhead of a call


class _Spent(NamedTuple):
    wall_s: float
    own_s: float


def main(arguments: list[str]) -> int:
    """Task file in, answer file out (rank 0)."""
    task = json.loads(Path(arguments[0]).read_text())
    torch.manual_seed(0)
    with start_process(task["device"], Mesh(shard=task["num_devices"])) as process:
        bench = MachineBench(process, task["buffer_bytes"], task["seconds"])
        answer = bench.measure()
        if process.leads:
            Path(arguments[1]).write_text(json.dumps(answer))
    return 0


class MachineBench:
    """Measures one figure after another, all ranks together.

    Args:
        process: this rank among all devices.
        buffer_bytes: memory that the bandwidth is measured in, of each rank.
        seconds: of each measurement of a rate.
    """

    def __init__(self, process: Process, buffer_bytes: int, seconds: float) -> None:
        self.process, self.buffer_bytes, self.seconds = process, buffer_bytes, seconds
        self.is_gpu = process.device.type == "cuda"
        self._shares: list[float] = []

    def measure(self) -> dict[str, float]:
        """Figures of one device by name, the mean of all; SI units."""
        rates = {
            "matmul": self._matmul(),
            "memory_bandwidth": self._read(),
            "launch_overhead": self._call(),
        }
        if self.process.world_size > 1:
            rates |= self._link()
        if self.is_gpu:
            free, total = torch.cuda.mem_get_info(self.process.device)
            rates |= {"memory": float(free), "total_memory": float(total)}
        found = {name: self.process.mean(value) for name, value in rates.items()}
        found["cores_frac"] = self.process.mean(median(self._shares)) if self._shares else 1.0
        found["threads"] = float(torch.get_num_threads())
        return found

    def _matmul(self) -> float:
        """FLOP/s of bf16 products of some rows with one weight after another, as in layers."""
        rows, size = (8192, 8192) if self.is_gpu else (1024, 2048)
        x_SD = self._normal(rows, size)
        weights = [self._normal(size, size) for _ in range(_WEIGHTS)]

        def layers() -> None:
            for weight_FD in weights:
                functional.linear(x_SD, weight_FD)

        return 2.0 * rows * size**2 * _WEIGHTS / self._typical_s(layers)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self.process.device)

    def _read(self) -> float:
        """Bytes per second of a scalar product of two long vectors."""
        length = self.buffer_bytes // 8  # two vectors of float32
        x, y = (torch.ones(length, device=self.process.device) for _ in range(2))
        return (x.nbytes + y.nbytes) / self._typical_s(lambda: torch.dot(x, y))

    def _call(self) -> float:
        """Seconds of host work for one operator on hardly any data."""
        x = torch.ones(8, device=self.process.device)
        start_s = process_time()
        for _ in range(_SMALL_CALLS):
            x.add_(1.0)
        return (process_time() - start_s) / _SMALL_CALLS

    def _link(self) -> dict[str, float]:
        """Of a ring all-reduce: bytes a second that a device sends, and seconds of a tiny one."""
        group, size = self.process.mesh.get_group("shard"), self.process.world_size
        large = torch.zeros(1 << 22, device=self.process.device)  # 16 MiB
        small = torch.zeros(1, device=self.process.device)
        large_s, small_s = (
            median(self._wall_s(lambda data=data: dist.all_reduce(data, group=group)))
            for data in (large, small)
        )
        sent_bytes = 2.0 * (size - 1) / size * large.nbytes
        return {
            "link_bandwidth": sent_bytes / max(large_s - small_s, 1e-9),
            "link_latency": small_s,
        }

    def _wall_s(self, call: Callable[[], object]) -> list[float]:
        """Wall time of each of a fixed number of calls: ranks must make as many as each other."""
        spent = []
        for _ in range(3 * _FEWEST):
            self.process.barrier()
            spent.append(self._time(call).wall_s)
        return spent[_FEWEST:]

    def _typical_s(self, call: Callable[[], object]) -> float:
        """Median of a device's own time of a call, over `seconds`."""
        spent: list[_Spent] = []
        self._time(call)
        self.process.barrier()
        end_s = perf_counter() + self.seconds
        while perf_counter() < end_s or len(spent) < _FEWEST:
            spent.append(self._time(call))
        if not self.is_gpu:
            whole = [sum(each) for each in zip(*spent)]
            self._shares.append(min(1.0, whole[1] / whole[0]))
        return median(each.own_s for each in spent)

    def _time(self, call: Callable[[], object]) -> _Spent:
        start_s, own_s = self._clock()
        call()
        end_s, own_end_s = self._clock()
        return _Spent(end_s - start_s, own_end_s - own_s)

    def _clock(self) -> _Spent:
        if self.is_gpu:
            torch.cuda.synchronize()
            return _Spent(perf_counter(), perf_counter())
        return _Spent(perf_counter(), process_time() / torch.get_num_threads())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
