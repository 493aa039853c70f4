"""The harness itself: results by rank, the cause first, hangs named, the pool reused."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import PlanError
from tests.ranks import DIED, RankFailed, current_store, run_ranks

pytestmark = pytest.mark.dist


def sum_of_ranks(rank: int, world_size: int, scale: float) -> tuple[float, int, int]:
    total = torch.tensor([rank * scale])
    dist.all_reduce(total)
    return total.item(), torch.get_num_threads(), os.getpid()


@pytest.mark.parametrize("world_size", [1, 3])
def test_results_come_by_rank(world_size):
    answers = run_ranks(sum_of_ranks, world_size, 10.0)
    assert [total for total, _, _ in answers] == [10.0 * sum(range(world_size))] * world_size
    assert all(threads == 1 for _, threads, _ in answers)


def test_workers_are_reused():
    first, second = (run_ranks(sum_of_ranks, 2, 1.0) for _ in range(2))
    assert [pid for *_, pid in first] == [pid for *_, pid in second]
    assert os.getpid() not in [pid for *_, pid in first]


def fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise PlanError("layout/divide", "width", 7, "must be a multiple of tp", legal=[6, 8])
    dist.barrier()


def test_cause_comes_before_what_others_say_about_it():
    with pytest.raises(RankFailed, match=r"\Arank 1 failed first:\nTraceback") as caught:
        run_ranks(fail_on_one, 2)
    assert caught.value.rank == 1
    assert isinstance(caught.value.error, PlanError) and caught.value.error.legal == (6, 8)
    assert "rank 0" in str(caught.value)
    assert run_ranks(sum_of_ranks, 2, 1.0)[0][0] == 1.0


def hang_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(600)


def test_hang_ends_at_the_timeout_and_names_the_rank():
    start_s = time.monotonic()
    with pytest.raises(RankFailed, match=r"no answer within 4 s from ranks \[1\]") as caught:
        run_ranks(hang_on_one, 2, timeout_s=4.0)
    assert time.monotonic() - start_s < 100.0
    assert "hang_on_one" in str(caught.value) and "last collective" in str(caught.value)
    assert run_ranks(sum_of_ranks, 2, 1.0)[0][0] == 1.0


def leave_zero_alone(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(3))
    time.sleep(600)


def test_hang_names_the_collective_that_a_rank_waits_in():
    with pytest.raises(RankFailed) as caught:
        run_ranks(leave_zero_alone, 2, timeout_s=4.0, backend="logged_gloo")
    text = str(caught.value)
    assert text.startswith("no answer within 4 s from ranks [0, 1]")
    waits, sleeps = text.split("rank 1: ")
    assert "last collective: all_reduce default_pg#0, 12 bytes, not seen to end" in waits
    assert "last collective: none logged" in sleeps


def kill_one(rank: int, world_size: int) -> int:
    store = current_store()
    if rank == 1 and store.add("lives", 1) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return store.add("lives", 0)


def test_death_is_named_with_its_signal():
    with pytest.raises(RankFailed, match=r"rank 1 failed first:\ndied with exit code -9"):
        run_ranks(kill_one, 2, backend=None)


def test_a_death_that_belongs_to_the_test_is_a_result():
    assert run_ranks(kill_one, 2, backend=None, may_die=(1,))[1] == DIED


def test_a_rank_comes_back_after_its_death():
    assert run_ranks(kill_one, 2, backend=None, may_die=(1,), respawn=True)[1] == 2
