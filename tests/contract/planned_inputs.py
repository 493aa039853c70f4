"""Worlds with real transfers and no model: every op does nothing, every tensor fits the plan."""

from __future__ import annotations

from typing import Any

import torch

from phalanx.action import Collective, Compute, Move, Program, Send
from phalanx.drive import drive
from phalanx.trace import Trace
from phalanx.worlds.dist import DistWorld
from phalanx.worlds.local import LocalWorld
from phalanx.worlds.pending import Entry
from phalanx.worlds.real import RealWorld
from phalanx.worlds.torch_tensors import RankContext
from tests.ranks import current_store

LogRow = tuple[str, str]


class AnyOp(dict):
    """Every name is bound to an op that does nothing."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Any:
        return _nothing


def _nothing(context: RankContext, action: Compute) -> None:
    return None


class PlannedInputs:
    """Puts a tensor of the planned size under each handle that is about to travel.

    It stands where a world asks what disturbs it: before an action starts.
    """

    def __init__(self, world: RealWorld) -> None:
        self._world = world
        world.interference = self

    def hold_s(self, entry: Entry) -> float:
        """Nothing waits; a transfer finds its input."""
        action = entry.action
        if isinstance(action, Send | Collective | Move):
            parts = 1
            if isinstance(action, Collective) and action.collective == "all_gather":
                parts = len(action.members) or self._world.mesh.degree(action.axis)
            self._provide(entry.rank, action.tensor, action.payload_bytes / parts)
        return 0.0

    def _provide(self, rank: int, handle: str, num_bytes: float) -> None:
        tensors = self._world.context(rank).tensors
        if handle not in tensors or tensors[handle].nbytes != num_bytes:
            tensors[handle] = torch.zeros(int(num_bytes) // 4)

    def after_compute(self, entry: Entry) -> None:
        """Nothing."""

    def copies(self, entry: Entry) -> int:
        """Every message arrives once."""
        return 1

    def blame(self, detail: str) -> None:
        """No fault explains anything here."""


def play_locally(program: Program, num_steps: int, **more: Any) -> Trace:
    """A program with all ranks in this process; `more` as for `drive`."""
    world = LocalWorld(program.mesh, AnyOp())
    PlannedInputs(world)
    return drive(world, program=program, num_steps=num_steps, **more)


def play_programs(
    rank: int, world_size: int, programs: list[Program], num_steps: int
) -> list[list[LogRow]]:
    """Programs one after the other on real processes; the log of this rank for each."""
    logs = []
    for number, program in enumerate(programs):
        world = DistWorld(
            program.mesh, AnyOp(), rank, current_store(), timeout_s=20.0, name=f"world{number}"
        )
        PlannedInputs(world)
        logs.append(drive(world, program=program, num_steps=num_steps).log(rank))
    return logs
