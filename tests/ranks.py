"""Run a function on several real processes: `run_ranks`.

    from tests.ranks import RankFailed, run_ranks

    def sum_of_ranks(rank: int, world_size: int, scale: float) -> float:
        total = torch.tensor([rank * scale])
        torch.distributed.all_reduce(total)  # a gloo group of world_size ranks is ready
        return total.item()

    @pytest.mark.dist
    def test_all_reduce_sums():
        assert run_ranks(sum_of_ranks, 2, 10.0) == [10.0, 10.0]

    @pytest.mark.dist
    def test_error_of_a_rank():
        with pytest.raises(RankFailed, match="layout/divide") as caught:
            run_ranks(bad, 2)
        assert caught.value.rank == 1 and caught.value.error.code == "layout/divide"

The function stands at module level of a test file; arguments and results are pickled (return plain
numbers, lists or small CPU tensors). Workers are started once per test session, with torch
imported, one thread each, and reused; each call gets its own store on a port chosen by the
operating system, its own default process group, and the seed 1234 + rank. Nothing else is reset:
undo what you patch.

Failures: the traceback of the rank that failed first comes first, what the others say about it only
as one line each. After `timeout_s` the ranks that did not answer are named with their last logged
collective and the stack that they hang in. After a death or a hang the pool is rebuilt.

To test failures: `may_die=(2,)` accepts that rank 2 dies (its result is `DIED`); with
`respawn=True` a fresh process calls the function again for it, and its result counts.
`backend=None` makes no process group; `current_store()` is the call's store in either case.
"""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from tests.rank_worker import GRACE_S, LOADED, current_store

__all__ = ["DIED", "RankFailed", "close_pool", "current_store", "run_ranks"]

# torch asks the name server who 127.0.0.1 is at each connection; one that is silent costs 5 s
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

ROOT = Path(__file__).resolve().parent.parent
MAX_WORKERS = 8
FIRST_WORKERS = 4
START_S = 100.0  # importing torch on a busy machine
DIED = "died"


class RankFailed(AssertionError):
    """Attributes:
    rank: the rank that failed first.
    error: its exception, when that can be pickled; None after a death or a hang.
    errors: rank -> exception or None, for all ranks that failed.
    """

    def __init__(self, message: str, rank: int, errors: dict[int, BaseException | None]) -> None:
        super().__init__(message)
        self.rank, self.errors = rank, errors
        self.error = errors.get(rank)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    backend: str | None = "gloo",
    may_die: Collection[int] = (),
    respawn: bool = False,
) -> list[Any]:
    """The results of `fn(rank, world_size, *args)` by rank, each in a process of its own.

    Args:
        timeout_s: for the whole call; waits inside its process group last a little longer, so that
            a hang is reported with what every rank was doing.
        backend: of the default process group; the logged form of a backend (worlds.logged_group)
            is "logged_gloo". None: no group.
        may_die: ranks whose death is part of the test.
        respawn: start a rank of `may_die` again after its death, once.

    Raises:
        RankFailed: a rank raised, died or hung.
    """
    from torch.distributed import TCPStore

    assert 1 <= world_size <= MAX_WORKERS, world_size
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    task = pickle.dumps((fn, args))
    call = _Call(store.port, world_size, task, timeout_s, backend, may_die, respawn)
    return call.run(_pool)


class _Worker:
    """One process of the pool, seen from the parent."""

    def __init__(self) -> None:
        self.pipe, child_pipe = Pipe()
        self.answers, child_answers = Pipe()
        self.is_ready = False
        self.output = tempfile.TemporaryFile()
        fds = (child_pipe.fileno(), child_answers.fileno())
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
        code = f"from tests.rank_worker import worker_main; worker_main{fds}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=fds,
            env=env,
            cwd=ROOT,
            stdout=self.output,
            stderr=self.output,
        )
        child_pipe.close()
        child_answers.close()

    def await_ready(self, end_s: float) -> None:
        """Wait until torch is imported, so that no time of a call goes into that."""
        if not self.is_ready:
            if not self.pipe.poll(max(0.0, end_s - time.monotonic())):
                raise TimeoutError(f"a worker did not start in {START_S:g} s")
            try:
                self.is_ready = pickle.loads(self.pipe.recv_bytes()) == "ready"
            except EOFError:
                raise RuntimeError(f"a worker did not start:\n{self.last_output()}") from None

    def where(self) -> str:
        """What its watcher thread says it is doing."""
        try:
            self.answers.send("where")
            if self.answers.poll(2.0):
                return self.answers.recv()
        except (OSError, EOFError):
            pass
        return "no answer: stopped or dead"

    def last_output(self, num_bytes: int = 2000) -> str:
        size = self.output.seek(0, os.SEEK_END)
        self.output.seek(max(0, size - num_bytes))
        return self.output.read().decode(errors="replace")

    def stop(self) -> None:
        self.process.kill()  # also ends a stopped process
        self.process.wait()
        for end in (self.pipe, self.answers, self.output):
            end.close()


class _Pool:
    """Workers that wait for a call; grows on demand."""

    def __init__(self) -> None:
        self.workers: list[_Worker] = []

    def take(self, count: int) -> list[_Worker]:
        self.workers = [w for w in self.workers if w.process.poll() is None]
        wanted = max(count, FIRST_WORKERS)
        self.workers += [_Worker() for _ in range(wanted - len(self.workers))]
        end_s = time.monotonic() + START_S
        for worker in self.workers[:count]:
            worker.await_ready(end_s)
        return self.workers[:count]

    def replace(self, old: _Worker) -> _Worker:
        old.stop()
        new = _Worker()
        self.workers[self.workers.index(old)] = new
        new.await_ready(time.monotonic() + START_S)
        return new

    def drop(self, workers: Collection[_Worker]) -> None:
        for worker in workers:
            worker.stop()
        self.workers = [w for w in self.workers if w not in workers]

    def close(self) -> None:
        """End all workers; the next call starts new ones."""
        self.drop(list(self.workers))


_pool = _Pool()
atexit.register(_pool.close)
close_pool = _pool.close


class _Call:
    """One `run_ranks`: sends the task, collects one answer per rank."""

    def __init__(self, port, world_size, task, timeout_s, backend, may_die, respawn) -> None:
        self.world_size, self.timeout_s, self.respawn = world_size, timeout_s, respawn
        self.may_die = set(may_die)
        self.head = (port, world_size, timeout_s, backend, list(sys.path))
        self.task = task
        self.results: dict[int, Any] = {}
        self.failures: list[tuple[float, int, BaseException | None, str]] = []

    def run(self, pool: _Pool) -> list[Any]:
        self.workers = dict(enumerate(pool.take(self.world_size)))
        hung = self._load(pool)
        if not hung and not self.failures:
            for worker in self.workers.values():
                worker.pipe.send_bytes(b"go")
            hung = self._await(pool, self.timeout_s)
        where = {rank: self.workers[rank].where() for rank in hung}
        pool.drop([self.workers[rank] for rank in hung])
        if where or self.failures:
            raise self._failure(where)
        return [self.results[rank] for rank in range(self.world_size)]

    def _load(self, pool: _Pool) -> list[int]:
        """Let all import what the task needs, so that none keeps the others waiting with that."""
        for rank in self.workers:
            self._send(rank)
        hung = self._await(pool, START_S)
        for rank in self.workers if hung or self.failures else ():
            if self.results.pop(rank, None) == LOADED:
                self.workers[rank].pipe.send_bytes(b"skip")
        return hung

    def _send(self, rank: int) -> None:
        self.workers[rank].pipe.send_bytes(pickle.dumps((rank, *self.head)))
        self.workers[rank].pipe.send_bytes(self.task)

    def _await(self, pool: _Pool, timeout_s: float) -> list[int]:
        """Collect one answer of each rank; the ranks that gave none in time."""
        waiting = set(self.workers)
        end_s = time.monotonic() + timeout_s
        while waiting and time.monotonic() < end_s:
            pipes = {self.workers[rank].pipe: rank for rank in waiting}
            for pipe in wait(list(pipes), timeout=max(0.0, end_s - time.monotonic())):
                rank = pipes[pipe]
                kind = self._collect(rank, pipe, pool)
                if kind != "again":
                    waiting.discard(rank)
                if kind == "failed":
                    end_s = min(end_s, time.monotonic() + GRACE_S)
        return sorted(waiting)

    def _collect(self, rank: int, pipe: Connection, pool: _Pool) -> str:
        """What became of the rank: "done", "failed" or "again"."""
        try:
            kind, at_s, value, text = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return self._died(rank, pool)
        if kind == "done":
            self.results[rank] = value
        elif kind == "failed":
            self.failures.append((at_s, rank, value, text))
        return kind

    def _died(self, rank: int, pool: _Pool) -> str:
        worker = self.workers[rank]
        code = worker.process.wait()
        if rank not in self.may_die:
            text = f"died with exit code {code}; its last output:\n{worker.last_output()}"
            self.failures.append((time.monotonic(), rank, None, text))
            pool.drop([worker])
            return "failed"
        if self.respawn:
            self.may_die.discard(rank)
            self.workers[rank] = pool.replace(worker)
            self._send(rank)
            self.workers[rank].pipe.recv_bytes()  # it has loaded the task
            self.workers[rank].pipe.send_bytes(b"go")
            return "again"
        pool.drop([worker])
        self.results[rank] = DIED
        return "done"

    def _failure(self, hung: dict[int, str]) -> RankFailed:
        failures = sorted(self.failures, key=lambda failure: failure[0])
        lines = []
        if failures:
            _, first, _, text = failures[0]
            lines.append(f"rank {first} failed first:\n{text.rstrip()}")
            for _, rank, _, text in failures[1:]:
                lines.append(f"rank {rank} then: {text.rstrip().splitlines()[-1]}")
            lines += [f"rank {rank} still waited: {w.splitlines()[0]}" for rank, w in hung.items()]
        else:
            first = min(hung)
            lines.append(f"no answer within {self.timeout_s:g} s from ranks {sorted(hung)}")
            lines += [f"rank {rank}: {where}" for rank, where in hung.items()]
        errors = {rank: error for _, rank, error, _ in failures} | dict.fromkeys(hung)
        return RankFailed("\n".join(lines), first, errors)
