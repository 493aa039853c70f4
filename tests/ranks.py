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
import random
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MAX_WORKERS = 8
FIRST_WORKERS = 4
GRACE_S = 5.0  # for the others to notice that a rank failed
START_S = 60.0
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
        timeout_s: for the whole call, and for each wait inside its process group.
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
        self.output = tempfile.TemporaryFile()
        fds = (child_pipe.fileno(), child_answers.fileno())
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": path,
        }
        code = f"from tests.ranks import worker_main; worker_main{fds}"
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
        return self.workers[:count]

    def replace(self, old: _Worker) -> _Worker:
        old.stop()
        new = _Worker()
        self.workers[self.workers.index(old)] = new
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
        for rank in self.workers:
            self._send(rank)
        waiting = set(self.workers)
        end_s = time.monotonic() + self.timeout_s + START_S
        while waiting and time.monotonic() < end_s:
            pipes = {self.workers[rank].pipe: rank for rank in waiting}
            for pipe in wait(list(pipes), timeout=max(0.0, end_s - time.monotonic())):
                rank = pipes[pipe]
                kind = self._collect(rank, pipe, pool)
                if kind == "started":
                    end_s = min(end_s, time.monotonic() + self.timeout_s)
                elif kind != "again":
                    waiting.discard(rank)
                if kind == "failed":
                    end_s = min(end_s, time.monotonic() + GRACE_S)
        hung = {rank: self.workers[rank].where() for rank in sorted(waiting)}
        pool.drop([self.workers[rank] for rank in waiting])
        if hung or self.failures:
            raise self._failure(hung)
        return [self.results[rank] for rank in range(self.world_size)]

    def _send(self, rank: int) -> None:
        self.workers[rank].pipe.send_bytes(pickle.dumps((rank, *self.head)))
        self.workers[rank].pipe.send_bytes(self.task)

    def _collect(self, rank: int, pipe: Connection, pool: _Pool) -> str:
        """What became of the rank: "started", "done", "failed" or "again"."""
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


# ---- in the worker ---------------------------------------------------------------------------

_store: Any = None


def current_store() -> Any:
    """The store of the current call, in a worker."""
    assert _store is not None, "current_store() is for functions that run_ranks runs"
    return _store


def worker_main(pipe_fd: int, answers_fd: int) -> None:
    """Serve calls until the parent closes the pipe."""
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    pipe = Connection(pipe_fd)
    main_thread = threading.get_ident()
    threading.Thread(
        target=_answer, args=(Connection(answers_fd), main_thread), daemon=True
    ).start()
    while True:
        try:
            head, task = pickle.loads(pipe.recv_bytes()), pipe.recv_bytes()
        except EOFError:
            os._exit(0)  # skips the teardown of process groups that a test may have left
        pipe.send_bytes(pickle.dumps(("started", time.monotonic(), None, "")))
        pipe.send_bytes(_serve(head, task))


def _serve(head: tuple, task: bytes) -> bytes:
    import torch.distributed

    rank, port, world_size, timeout_s, backend, path = head
    sys.path[:] = path
    try:
        value = _run_task(task, rank, port, world_size, timeout_s, backend)
        answer = pickle.dumps(("done", time.monotonic(), value, ""))
    except BaseException as error:  # a worker must report whatever happened and live on
        at_s, text = time.monotonic(), traceback.format_exc()
        try:
            answer = pickle.dumps(("failed", at_s, error, text))
            pickle.loads(answer)
        except Exception:  # not every exception survives pickling
            answer = pickle.dumps(("failed", at_s, None, text))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return answer


def _run_task(task, rank, port, world_size, timeout_s, backend) -> Any:
    global _store
    import torch
    import torch.distributed

    fn, args = pickle.loads(task)
    torch.manual_seed(1234 + rank)
    random.seed(1234 + rank)
    timeout = timedelta(seconds=timeout_s)
    _store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    if backend is not None:
        if backend.startswith("logged_"):
            from phalanx.worlds.logged_group import backend_name

            backend = backend_name(backend.removeprefix("logged_"))
        torch.distributed.init_process_group(
            backend, store=_store, rank=rank, world_size=world_size, timeout=timeout
        )
    return fn(rank, world_size, *args)


def _answer(answers: Connection, main_thread: int) -> None:
    """Tell where the main thread is; works while that hangs in native code."""
    while True:
        try:
            answers.recv()
            stack = traceback.format_stack(sys._current_frames()[main_thread], limit=6)
            answers.send(f"{_last_collective()}\n{''.join(stack)}")
        except (EOFError, OSError):
            return


def _last_collective() -> str:
    module = sys.modules.get("phalanx.worlds.comm_log")
    last = module.last_collective() if module is not None else None
    return f"last collective: {last or 'none logged'}"
