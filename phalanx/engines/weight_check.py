"""Replicas compared: weights that ranks hold more than once must be equal bit by bit.

A parameter that a mesh axis does not cut is held by all ranks along that axis: everything along
"replicate" and "cp", along "shard" or "tp" what is not cut there, and between the stages of a
pipeline an embedding that is the head too. Once they differ (a flipped bit, a kernel that rounds
differently, a gradient that was not summed) training goes on and is wrong; only a comparison finds
it.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.engines.checkpoint.slices import Slice, slice_of
from phalanx.engines.process import Process
from phalanx.engines.slow_ranks import RankClock, SlowRank, slow_ranks, slow_text
from phalanx.errors import WorldError

_ROW_BYTES = 512


class WeightCheck:
    """Compares the replicas of a module's parameters, and the speed of ranks in the same gather.

    Nothing is hashed or sent for what one rank alone holds. Speeds are compared between ranks that
    hold the same parameters: stages of a pipeline do different work. All ranks call the constructor
    and `run`, in the same order; the constructor before the first forward pass, in which FSDP2 puts
    gathered tensors in the place of a module's parameters.

    Args:
        module: bound; parameters are plain tensors or DTensors.
        process: its mesh names the axes.

    Attributes:
        clock: give it what each step took on this rank.
        hosts: host name of each rank.
        names: parameters of which two ranks or more hold the same part; the same on all ranks.
    """

    def __init__(self, module: nn.Module, process: Process) -> None:
        self._process, self.clock = process, RankClock()
        parameters = dict(module.named_parameters())
        held = _all_held(process, {name: slice_of(name, each) for name, each in parameters.items()})
        self._groups = _replicas(held)
        self.names = list(self._groups)
        self._parameters = [parameters.get(name) for name in self.names]
        self._peers = _alike(held)
        self.hosts: list[str] = [socket.gethostname()] * process.world_size
        if process.world_size > 1:
            dist.all_gather_object(self.hosts, socket.gethostname())

    def run(self, step: int) -> dict[str, Any]:
        """Compare all ranks after `step` steps.

        Returns:
            A line for `metrics.jsonl`: "kind" "ranks", "step", "rank_s" (of each rank: on the CPU
            seconds per token, on CUDA seconds of one and the same product, as a step's spans there
            hold the waiting for others), "slow" (ranks above 1.2 times the median) and "text"
            (about them, or "").

        Raises:
            WorldError: `train/weights` on every rank, naming the first parameter that differs, the
                ranks that hold another value than most, and their hosts.
        """
        table = self._gathered(self._hashes())
        hashes, rank_s = table[:, :-1], table[:, -1].view(torch.float64).tolist()
        for at, name in enumerate(self.names):
            column = hashes[:, at].tolist()
            for group in self._groups[name]:
                if len({column[rank] for rank in group}) > 1:
                    raise self._differ(step, name, group, column)
        slow = [each for peers in self._peers for each in self._slow(rank_s, peers)]
        return {
            "kind": "ranks",
            "step": step,
            "rank_s": rank_s,
            "slow": [each.rank for each in slow],
            "text": slow_text(slow, self.hosts),
        }

    def _slow(self, rank_s: Sequence[float], peers: Sequence[int]) -> list[SlowRank]:
        """Who of these is slow."""
        theirs = [each if rank in peers else 0.0 for rank, each in enumerate(rank_s)]
        return slow_ranks(theirs, self.hosts)

    def _hashes(self) -> Tensor:
        """A hash of each replicated parameter (0 where this rank has none of it), and this rank's
        speed, on the host."""
        device, token_s = self._process.device, self.clock.take()
        rank_s = product_s(device) if device.type == "cuda" else token_s
        speed = torch.tensor([rank_s], dtype=torch.float64).view(torch.int64)
        if not self._parameters:
            return speed
        nothing = torch.zeros((), dtype=torch.int64, device=device)
        hashes = torch.stack([nothing if p is None else bits_hash(p) for p in self._parameters])
        return torch.cat([hashes.cpu(), speed])

    def _gathered(self, mine: Tensor) -> Tensor:
        """[ranks, parameters + 1]."""
        size = self._process.world_size
        if size == 1:
            return mine[None]
        rows = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(rows, mine)
        return torch.stack(rows)

    def _differ(
        self, step: int, name: str, group: Sequence[int], column: Sequence[int]
    ) -> WorldError:
        (usual, count), *_ = Counter(column[rank] for rank in group).most_common()
        others = [rank for rank in group if column[rank] != usual]
        same = [rank for rank in group if column[rank] == usual]
        if 2 * count <= len(group):
            value = f"different on {self._named(group)}"
        else:
            value = f"on {self._named(others)} not what {self._named(same)} hold"
        rule = "replicas must hold equal weights; go on from the last checkpoint"
        return WorldError("train/weights", f"{name} after step {step}", value, rule)

    def _named(self, ranks: Sequence[int]) -> str:
        """Ranks with their hosts."""
        hosts = dict.fromkeys(self.hosts[rank] for rank in ranks)
        numbers = ", ".join(map(str, ranks))
        return f"rank{'s' * (len(ranks) > 1)} {numbers} (host {', '.join(hosts)})"


def check_replicas(module: nn.Module, process: Process, step: int = 0) -> dict[str, Any]:
    """One comparison; see `WeightCheck`. All ranks call it."""
    return WeightCheck(module, process).run(step)


def product_s(device: torch.device, size: int = 4096, times: int = 4) -> float:
    """Median seconds of a bfloat16 matrix product on a CUDA device (unrun on CUDA); waits."""
    matrix = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 2)]
    with torch.cuda.device(device):
        for mark in marks:  # the first product warms up
            mark.record()
            matrix @ matrix
        marks[-1].synchronize()
    spans_ms = [one.elapsed_time(two) for one, two in pairwise(marks[1:])]
    return median(spans_ms) / 1e3


@torch.no_grad()
def bits_hash(parameter: Tensor) -> Tensor:
    """64 bits that depend on every bit of what this rank holds, an int64 scalar on its device.

    With s_i the sum of the i-th 512 bytes as 64-bit words: sum of (2 i + 1) s_i modulo 2^64, which
    no order of summation changes. Any one changed word changes it, and so do rows of 512 bytes that
    change places; words that change places within such a row do not.
    """
    held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    held_bytes = held.detach().contiguous().view(-1).view(torch.uint8)
    num_tail = held_bytes.numel() % _ROW_BYTES
    body, tail = held_bytes.split_with_sizes([held_bytes.numel() - num_tail, num_tail])
    total = _rows_hash(body, 0)
    if num_tail:
        padded = torch.nn.functional.pad(tail, (0, _ROW_BYTES - num_tail))
        total = total + _rows_hash(padded, body.numel() // _ROW_BYTES)
    return total


def _rows_hash(row_bytes: Tensor, first: int) -> Tensor:
    if row_bytes.storage_offset() % 8:
        row_bytes = row_bytes.clone()  # words must be aligned
    sums = row_bytes.view(torch.int64).view(-1, _ROW_BYTES // 8).sum(1)
    places = torch.arange(first, first + sums.numel(), device=sums.device)
    return (sums * (2 * places + 1)).sum()


def _all_held(process: Process, mine: Mapping[str, Slice]) -> list[dict[str, Slice]]:
    """What each rank holds of each parameter, by rank."""
    found = [dict(mine)] * process.world_size
    if process.world_size > 1:
        dist.all_gather_object(found, dict(mine))
    return found


def _replicas(held: Sequence[Mapping[str, Slice]]) -> dict[str, list[tuple[int, ...]]]:
    """Name -> ranks that hold the same part of it, for each part that more than one holds."""
    groups: dict[str, dict[Slice, list[int]]] = {}
    for rank, slices in enumerate(held):
        for name, each in slices.items():
            if each.num_elements:
                groups.setdefault(name, {}).setdefault(each, []).append(rank)
    shared = {
        name: [tuple(ranks) for ranks in parts.values() if len(ranks) > 1]
        for name, parts in groups.items()
    }
    return {name: found for name, found in shared.items() if found}


def _alike(held: Sequence[Mapping[str, Slice]]) -> list[list[int]]:
    """Ranks that hold parts of the same parameters, and so do the same work."""
    found: dict[frozenset[str], list[int]] = {}
    for rank, slices in enumerate(held):
        found.setdefault(frozenset(slices), []).append(rank)
    return list(found.values())
