"""Islands as threads of one process: real groups and votes, faults that no process dies of."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from phalanx.drive import drive
from phalanx.engines.islands import IslandWorld
from phalanx.errors import WorldError
from phalanx.membership import Timeouts
from phalanx.mesh import Mesh
from phalanx.policies.recover.rejoin import Rejoin
from phalanx.worlds.membership_store import MembershipStore
from tests.ranks import current_store, run_ranks

TIMEOUTS = Timeouts(
    heartbeat_s=0.05, detect_s=3.0, exchange_s=40.0, island_s=41.0, init_s=45.0, quorum_s=60.0
)
FACTS = {"grad_bytes": 8, "state_bytes": 8, "num_steps": 3}


class Summing:
    """Contributes 10 ** rank and keeps the sums that were committed."""

    def __init__(self, rank: int) -> None:
        self.rank, self.sums = rank, {}

    def grad(self, context, action) -> None:
        context.tensors["grad"] = torch.tensor([10.0**self.rank, 1.0])

    def update(self, context, action) -> None:
        self.sums[action.item] = context.tensors["grad"].tolist()

    @property
    def ops(self) -> dict[str, Any]:
        return {"grad": self.grad, "update": self.update}


def run_island(store: TCPStore, rank: int, size: int, island: Summing, timeouts=TIMEOUTS):
    membership = MembershipStore(store, rank, range(size), timeouts)
    world = IslandWorld(Mesh(replica=size), membership, store, ops=island.ops, facts=FACTS)
    with world:
        return drive(world, reacts=[Rejoin()])


def run_islands(islands: list[Summing], timeouts=TIMEOUTS) -> list[Any]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    size = len(islands)
    with ThreadPoolExecutor(size) as pool:
        runs = [
            pool.submit(run_island, store, rank, size, island, timeouts)
            for rank, island in enumerate(islands)
        ]
        return [run.result(timeout=100) for run in runs]


@pytest.mark.parametrize("size", [1, 3])
def test_every_step_is_summed_and_committed_once(size):
    islands = [Summing(rank) for rank in range(size)]
    traces = run_islands(islands)
    total = float(sum(10**rank for rank in range(size)))
    for island, trace in zip(islands, traces):
        assert island.sums == {step: [total, float(size)] for step in (1, 2, 3)}
        names = [operator for operator, _ in trace.log(island.rank)]
        assert names == ["membership.form", *["grad", "all_reduce", "vote", "update", "commit"] * 3]
        sent = trace.where(operator="all_reduce")
        assert sent.column("payload_bytes").tolist() == [8.0] * 3
        assert sent.column("wire_bytes").tolist() == pytest.approx([16.0 * (size - 1) / size] * 3)


class FailsOnce(Summing):
    """Its second step's gradient fails the first time, as an exchange inside the island might."""

    failures = 0

    def grad(self, context, action) -> None:
        if action.item == 2 and not self.failures:
            self.failures += 1
            raise WorldError("world/timeout", "inside", None, "a collective of the island failed")
        super().grad(context, action)


def test_a_step_that_fails_on_one_island_is_redone_by_all():
    islands = [Summing(0), FailsOnce(1), Summing(2)]
    started_s = time.monotonic()
    traces = run_islands(islands)
    assert islands[1].failures == 1
    for island, trace in zip(islands, traces):
        assert island.sums == {step: [111.0, 3.0] for step in (1, 2, 3)}
        formed = [label for name, label in trace.log(island.rank) if name == "membership.form"]
        assert formed == ["form@1.1", "form@2.2"], "the redo has an epoch of its own"
    assert time.monotonic() - started_s < TIMEOUTS.exchange_s, "the others' waits were ended"


class Breaks(Summing):
    def grad(self, context, action) -> None:
        raise ZeroDivisionError("a bug, not a part of the game")


def test_a_bug_is_raised_and_not_redone():
    with pytest.raises(ZeroDivisionError):
        run_islands([Breaks(0)])


def test_an_op_that_is_not_bound_is_named():
    island = Summing(0)
    with pytest.raises(WorldError, match="'update': not bound") as caught:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        membership = MembershipStore(store, 0, (0,), TIMEOUTS)
        ops = {"grad": island.grad}
        with IslandWorld(Mesh(replica=1), membership, store, ops=ops, facts=FACTS) as world:
            drive(world, reacts=[Rejoin()])
    assert caught.value.code == "world/unbound"


def test_a_start_without_everyone_names_who_is_missing():
    brief = Timeouts(
        heartbeat_s=0.02, detect_s=0.1, exchange_s=0.2, island_s=0.3, init_s=0.4, quorum_s=0.5
    )
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(WorldError, match=r"members = \[1, 2\]: did not come within 0.5 s"):
        run_island(store, 0, 3, Summing(0), brief)


class Stops(Summing):
    """Stops itself in step 2; the first one wakes it when the others have gone on."""

    def grad(self, context, action) -> None:
        if action.item == 2 and self.rank == 2:
            current_store().set("stopped", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        super().grad(context, action)

    def update(self, context, action) -> None:
        super().update(context, action)
        if action.item == 2 and self.rank == 0:
            os.kill(int(current_store().get("stopped")), signal.SIGCONT)


def run_stopping(rank: int, world_size: int) -> Any:
    island = Stops(rank)
    try:
        run_island(current_store(), rank, world_size, island)
    except WorldError as error:
        return error.code, error.rule
    return island.sums


@pytest.mark.dist
def test_a_member_that_was_silent_too_long_finds_itself_left_out():
    first, second, stopped = run_ranks(run_stopping, 3, backend=None)
    assert first == second == {1: [111.0, 3.0], 2: [11.0, 2.0], 3: [11.0, 2.0]}
    assert stopped == ("world/membership", "goes on without this process; start it again to join")
