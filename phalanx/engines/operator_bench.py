"""A process that measures the operators of a model, as `engines.calibrate` asks.

All processes of the planned role measure the same thing at the same time, so caches, memory
bandwidth and cores are shared as they will be in training. Every operator comes in several copies
with weights of their own, run one after another with all results alive, as in a model.

Legend: S tokens of a row, N targets, D model, F feed-forward, V vocabulary, H heads, C channels.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from time import perf_counter, process_time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import phalanx.engines.train  # noqa: F401  to hold what a training process holds
from phalanx.cost.local_shapes import local_config
from phalanx.cost.training import RateKey, Workload, rate_key
from phalanx.doctor.machine import process_age_s
from phalanx.engines.operator_cases import CASES, evenly
from phalanx.engines.optim import ShardedAdamW
from phalanx.engines.process import Process, resident_bytes, start_process
from phalanx.mesh import Mesh
from phalanx.models.config import DecoderConfig, parse_config
from phalanx.models.decoder_layers import Projection
from phalanx.models.operators import Operator, operators
from phalanx.ops.attention import Documents

_COPIES, _PASSES = 6, 3
_SHORT_VOCABULARY = 1 << 13  # enough tiles of the head to meet all its shapes
_OPTIMIZER_TENSORS = 128
_GATHERED_ROWS, _GATHERED_MATRICES = 1024, 8
_EXCHANGES = 40
_REDUCED_PARTS = 16  # of the trained elements, one is reduced at once


class Rate(NamedTuple):
    """A measured rate; `cpu_value` counts processor time instead of wall time (0: no time).

    Where other programs compete for the cores, `cpu_value` is smaller than `value`.
    """

    value: float
    unit: str
    cpu_value: float = 0.0


class _Clock(NamedTuple):
    """Wall time, and processor time per thread; of a GPU, its own time twice."""

    wall_s: float
    cpu_s: float

    @staticmethod
    def now() -> _Clock:
        if torch.get_default_device().type == "cuda":
            torch.cuda.synchronize()
            return _Clock(perf_counter(), perf_counter())
        return _Clock(perf_counter(), process_time() / torch.get_num_threads())

    def since(self, start: _Clock) -> _Clock:
        return _Clock(self.wall_s - start.wall_s, self.cpu_s - start.cpu_s)


def main(arguments: list[str]) -> int:
    """Task file in, answer file out (rank 0)."""
    baseline_bytes = resident_bytes()
    task = json.loads(Path(arguments[0]).read_text())
    torch.manual_seed(0)
    with start_process(task["device"], Mesh(shard=task["num_processes"])) as process:
        start_s = process_age_s()
        torch.set_default_device(process.device)
        work = Workload(**task["work"])
        config = local_config(parse_config(task["config"]), work.tensor_degree)
        bench = OperatorBench(process, config, work)
        rates = bench.measure() | _library_bytes(process, bench, baseline_bytes)
        rates["start"] = Rate(start_s, "s")  # from its creation to a joined group
        if process.leads:
            table = {key: rate._asdict() for key, rate in rates.items()}
            Path(arguments[1]).write_text(json.dumps(table))
    return 0


def _library_bytes(process: Process, bench: OperatorBench, baseline_bytes: int) -> dict[str, Rate]:
    """What libraries hold in the memory that counts: the host's, or nothing of a GPU's, where
    only what torch allocated is compared."""
    held = dict.fromkeys(("kernels", "runtime", "baseline"), 0.0)
    if process.device.type == "cpu":
        runtime_bytes = _settled_bytes()
        bench.meet_shapes()
        # less than none is what the heap gave back meanwhile
        held["kernels"] = max(0.0, process.mean(_settled_bytes() - runtime_bytes))
        held["runtime"] = process.mean(runtime_bytes - baseline_bytes)
        held["baseline"] = process.mean(baseline_bytes)
    return {name: Rate(num_bytes, "byte") for name, num_bytes in held.items()}


def _settled_bytes() -> int:
    """Resident memory once all tensors are gone: what libraries keep for themselves."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    return resident_bytes()


def _differentiate(outputs: Sequence[Tensor]) -> None:
    """One backward pass of all, as a step has one: each begins and ends with work of its own."""
    wanted = [output for output in outputs if output.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [output.detach() for output in wanted])


class OperatorBench:
    """Measures one rate after another, all ranks together.

    Args:
        process: this rank among those that will train.
        config: shapes, a rank's own, and dtype.
        work: rows, targets and documents of a typical micro-batch; adapters.
    """

    def __init__(self, process: Process, config: DecoderConfig, work: Workload) -> None:
        self.process, self.config, self.work = process, config, work
        self.dtype = getattr(torch, config.dtype)
        self.lora = work.lora
        self.context_degree, self.document_tokens = work.context_degree, work.document_tokens
        self.documents = evenly(self._own(work.row_tokens), work.document_tokens)
        self.num_counted = self._own(work.row_counted)

    def _own(self, count: int) -> int:
        """A rank's share of what ranks of a context axis share."""
        return max(1, -(-count // self.context_degree))

    @property
    def positions(self) -> Tensor:
        """Of the rows in their documents."""
        return self.documents.positions(self.process.device)

    def measure(self) -> dict[RateKey, Rate]:
        """All rates that a prediction of this work asks for."""
        spent: dict[RateKey, tuple[_Clock, int]] = {}
        for key, ops in self._kinds().items():
            copies = min(len(ops), _COPIES)
            tokens = self.num_counted if ops[0].op == "head" else self.documents.bounds[-1]
            for phase, clock in zip("FB", self._operator(ops[0], copies)):
                spent[f"{key}.{phase}"] = clock, copies * tokens
        # the same share of the cores for all: no single operator was measured long enough for one
        wall_s, cpu_s = (sum(part) for part in zip(*(clock for clock, _ in spent.values())))
        rates = {
            key: Rate(clock.cpu_s / count * wall_s / cpu_s, "s/token", clock.cpu_s / count)
            for key, (clock, count) in spent.items()
        }
        return rates | {"optimizer": self._optimizer()} | self._sums() | self._collectives()

    def meet_shapes(self) -> None:
        """Run every kind of operator once for each shape of the work (and a single token, as
        samples are decoded), because libraries compile and keep kernels for each shape."""
        config, self.config = self.config, replace(self.config, vocab_size=_SHORT_VOCABULARY)
        for ops in self._kinds().values():
            if ops[0].op == "attention":
                lengths = self.work.document_lengths if self.context_degree == 1 else ()
                shapes = [(length, 1) for length in (1, *lengths)]
            elif ops[0].op == "head":
                counts = {self._own(count) for count in self.work.target_counts}
                shapes = [(max(1, count), count) for count in (1, *sorted(counts))]
            else:
                lengths = {self._own(length) for length in self.work.row_lengths}
                shapes = [(length, 1) for length in (1, *sorted(lengths))]
            for length, self.num_counted in shapes:
                self.documents = Documents((0, length))
                _differentiate([CASES[ops[0].op](self, ops[0])()])
        self.config = config

    def _kinds(self) -> dict[RateKey, list[Operator]]:
        kinds: dict[RateKey, list[Operator]] = {}
        for op in operators(self.config, document_tokens=self.work.document_tokens, lora=self.lora):
            kinds.setdefault(rate_key(op, self.config), []).append(op)
        return kinds

    def _operator(self, op: Operator, copies: int) -> tuple[_Clock, _Clock]:
        """Time of all copies forward and backward, with all results alive at once."""
        cases = [CASES[op.op](self, op) for _ in range(copies)]
        forward, backward = [], []
        for _ in range(1 + _PASSES):
            self.process.barrier()
            start = _Clock.now()
            outputs = [call() for call in cases]
            middle = _Clock.now()
            _differentiate(outputs)
            forward.append(middle.since(start))
            backward.append(_Clock.now().since(middle))
            del outputs
        return self._typical(forward), self._typical(backward)

    def _typical(self, passes: list[_Clock]) -> _Clock:
        """Median of all passes but the first, mean over ranks."""
        return _Clock(*(self.process.mean(median(part)) for part in zip(*passes[1:])))

    def _optimizer(self) -> Rate:
        """Clipping and AdamW on as many tensors and elements as this rank will hold."""
        share = max(1, self.work.num_trained // self.process.world_size)
        pieces = torch.randn(share).chunk(_OPTIMIZER_TENSORS)
        parameters = [nn.Parameter(piece.clone()) for piece in pieces]
        named = [(str(at), parameter) for at, parameter in enumerate(parameters)]
        optimizer = ShardedAdamW(named, clip_norm=1.0)
        spent = []
        for _ in range(1 + _PASSES):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            start = _Clock.now()
            optimizer.step(1e-4)
            spent.append(_Clock.now().since(start))
        wall_s, cpu_s = self._typical(spent)
        return Rate(wall_s / share, "s/element", cpu_s / share)

    def _sums(self) -> dict[RateKey, Rate]:
        """Bytes read and written per second where gradients are added up and copied; see
        `cost.step_sums`. Of as many elements as a reduction is measured with, or as rows have."""
        rows = self.documents.bounds[-1] * self.config.hidden_size
        count = max(rows, self.work.num_trained // _REDUCED_PARTS)
        mine, other = (torch.randn(count, dtype=self.dtype) for _ in range(2))
        wide, other_wide = (torch.randn(count, dtype=torch.float32) for _ in range(2))
        calls: dict[str, tuple[int, Callable[[], object]]] = {
            "add": (3 * mine.nbytes, lambda: mine.add_(other)),
            "add.wide": (3 * wide.nbytes, lambda: wide.add_(other_wide)),
            "copy": (mine.nbytes + wide.nbytes, lambda: mine.to(torch.float32, copy=True)),
        }
        return self._bytes_per_s(calls)

    def _bytes_per_s(
        self,
        calls: Mapping[str, tuple[int, Callable[[], object]]],
        after: Callable[[], None] | None = None,
    ) -> dict[RateKey, Rate]:
        """Of calls that move so many bytes each, taken in turn.

        Args:
            after: runs after each round, untimed.
        """
        spent_s: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(2 + _PASSES):
            for name, (_, call) in calls.items():
                self.process.barrier()
                start = _Clock.now()  # which waits for a GPU: a call only asks it
                call()
                spent_s[name].append(_Clock.now().since(start).wall_s)
            if after is not None:
                after()
        return {
            name: Rate(self.process.mean(num_bytes / median(spent_s[name][2:])), "byte/s")
            for name, (num_bytes, _) in calls.items()
        }

    def _collectives(self) -> dict[RateKey, Rate]:
        """Bytes per second of gathering a unit and of reducing its gradients, copies included."""
        world_size = self.process.world_size
        unit = nn.Sequential(
            *(
                Projection(self.config.hidden_size, _GATHERED_ROWS, dtype=self.dtype)
                for _ in range(_GATHERED_MATRICES)
            )
        )
        gathered_bytes = sum(p.nbytes for p in unit.parameters())
        fully_shard(unit, mesh=self.process.mesh)
        grads = torch.randn(
            world_size, max(1, self.work.num_trained // _REDUCED_PARTS), dtype=self.dtype
        )
        shard = torch.empty(grads.shape[1])
        rows_SD = torch.randn(self.documents.bounds[-1], self.config.hidden_size, dtype=self.dtype)
        group = self.process.mesh.get_group("shard")
        calls: dict[str, tuple[int, Callable[[], object]]] = {
            "all_gather": (gathered_bytes, unit.unshard),
            "reduce_scatter": (
                4 * grads.numel(),  # cast into a new buffer, as `fully_shard` packs them
                lambda: dist.reduce_scatter_tensor(
                    shard, grads.flatten().to(torch.float32, copy=True), group=group
                ),
            ),
            "all_reduce": (rows_SD.nbytes, lambda: dist.all_reduce(rows_SD, group=group)),
            "p2p": (rows_SD.nbytes, lambda: self._pass_on(rows_SD, group)),
        }

        def forget() -> None:
            unit.reshard()
            rows_SD.zero_()

        rates = self._bytes_per_s(calls, forget)
        if self.work.tensor_degree > 1:
            rates["all_reduce"] = self._among_products(rows_SD, group)
        return rates

    def _among_products(self, rows_SD: Tensor, group: dist.ProcessGroup) -> Rate:
        """Of an all-reduce between blocks: ranks come to it from products of their own, and what
        one waits for another is part of it."""
        width = self.config.intermediate_size
        product, spent_s = Projection(rows_SD.shape[1], width, dtype=self.dtype), []
        with torch.no_grad():
            for _ in range(_EXCHANGES):
                product(rows_SD)
                start = _Clock.now()
                dist.all_reduce(rows_SD, group=group)
                spent_s.append(_Clock.now().since(start).wall_s)
                rows_SD.zero_()
        return Rate(self.process.mean(rows_SD.nbytes / mean(spent_s[2:])), "byte/s")

    def _pass_on(self, rows_SD: Tensor, group: dist.ProcessGroup) -> None:
        """A message to the next rank and one from the rank before; alone, a copy."""
        size, rank = self.process.world_size, self.process.rank
        received_SD = torch.empty_like(rows_SD)
        if size == 1:
            received_SD.copy_(rows_SD)
            return
        ends = ((dist.isend, rows_SD, rank + 1), (dist.irecv, received_SD, rank - 1))
        ops = [dist.P2POp(call, rows, peer % size, group) for call, rows, peer in ends]
        for request in dist.batch_isend_irecv(ops):
            request.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
