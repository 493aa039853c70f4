"""Logical groups: each epoch fresh, waits end when it is over."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from phalanx.errors import WorldError
from phalanx.worlds import groups
from phalanx.worlds.groups import LogicalGroup, bury
from tests.ranks import DIED, current_store, run_ranks

pytestmark = pytest.mark.dist


def sum_of_ids(group: LogicalGroup, exchange) -> float:
    total = torch.tensor([float(group.my_id)])
    group.wait(exchange.allreduce([total]))
    return total.item()


def shrink_and_grow(rank: int, world_size: int) -> list[float]:
    group = LogicalGroup(current_store(), "islands", my_id=10 * rank, timeout_s=60.0)
    sums = []
    for epoch, members in enumerate([(0, 10, 20), (20, 0), (0, 10, 20)]):
        if group.my_id in members:
            sums.append(sum_of_ids(group, group.form(members, epoch)))
    group.close()
    return sums


def test_each_epoch_sums_over_its_own_members():
    sums = run_ranks(shrink_and_grow, 3, backend=None)
    assert sums == [[30.0, 20.0, 30.0], [30.0, 30.0], [30.0, 20.0, 30.0]]


def form_wrongly(rank: int, world_size: int) -> list[str]:
    group = LogicalGroup(current_store(), "islands", my_id=0, timeout_s=3.0)
    codes = []
    for members, epoch in [((1, 2), 0), ((0,), 3), ((0,), 3), ((0, 1), 4)]:
        try:
            group.form(members, epoch)
        except WorldError as error:
            codes.append(f"{error.code} {error.legal}")
    return codes


def test_wrong_epochs_are_refused_and_absent_members_named():
    codes = run_ranks(form_wrongly, 1, backend=None)[0]
    assert codes == ["world/membership (1, 2)", "world/membership (4,)", "world/timeout ()"]


def lose_a_member(rank: int, world_size: int) -> tuple[str, float, float]:
    group = LogicalGroup(current_store(), "islands", my_id=rank, timeout_s=60.0)
    exchange = group.form((0, 1, 2), 0)
    sum_of_ids(group, exchange)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:  # its neighbour never joins this exchange either
        time.sleep(0.5)
    else:
        threading.Timer(0.3, group.abort).start()
    start_s = time.monotonic()
    try:
        group.wait(exchange.allreduce([torch.ones(1)]))
        code = "no error"
    except WorldError as error:
        code = error.code
    del exchange
    total = sum_of_ids(group, group.form((0, 1), 1))
    return code, total, time.monotonic() - start_s


def test_survivors_of_a_kill_form_the_next_epoch_without_waiting_for_the_timeout():
    first, second, third = run_ranks(lose_a_member, 3, backend=None, may_die=(2,))
    assert third == DIED
    for code, total, took_s in (first, second):
        assert code == "world/membership" and total == 1.0
        assert took_s < 40.0


class Backend:
    """Of a group; notes that it was aborted."""

    def __init__(self) -> None:
        self.is_aborted = threading.Event()

    def abort(self) -> None:
        self.is_aborted.set()


class Group:
    """What is left of an epoch's group when the epoch is over."""

    def __init__(self, kind: str) -> None:
        self.kind, self.backend = kind, Backend()

    def _get_backend(self, device: torch.device) -> Backend:
        assert device.type == "cuda"
        return self.backend


def test_nccl_groups_are_aborted_long_before_the_watchdog_ends_the_process():
    nccl, gloo = Group("nccl"), Group("gloo")
    for group in (nccl, gloo):
        bury(group, timeout_s=3600.0)
    assert nccl.backend.is_aborted.wait(20.0)
    assert not gloo.backend.is_aborted.is_set(), "its threads are waited for"


def form_with(store: HashStore, my_id: int, members: tuple[int, ...], timeout_s: float) -> str:
    group = LogicalGroup(store, "islands", my_id, kind="nccl", timeout_s=timeout_s)
    try:
        return group.form(members, 3).kind
    except WorldError as error:
        return f"{error.code}: {error.rule}"


def test_an_epoch_over_nccl_forms_when_all_have_come_too(monkeypatch):
    """NCCL's group connects nobody when it is made, so the members meet at the store."""
    monkeypatch.setattr(groups, "LoggedGroup", lambda kind, *_args, **_options: Group(kind))
    assert form_with(HashStore(), 0, (0, 1), 0.3).startswith("world/timeout: not all of (0, 1)")
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        formed = [pool.submit(form_with, store, each, (5, 7), 30.0) for each in (5, 7)]
    assert [each.result() for each in formed] == ["nccl", "nccl"]
