"""What a worker process of `tests.ranks` does: load a function, join the others, answer."""

from __future__ import annotations

import os
import pickle
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

GRACE_S = 5.0  # for the others to notice that a rank failed
LOADED = "loaded"

_store: Any = None
_row_before: Any = None  # the last collective of the call before


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
    pipe.send_bytes(pickle.dumps("ready"))
    while True:
        try:
            head, task = pickle.loads(pipe.recv_bytes()), pipe.recv_bytes()
            _serve(pipe, head, task)
        except EOFError:
            os._exit(0)  # skips the teardown of process groups that a test may have left


def _serve(pipe: Connection, head: tuple, task: bytes) -> None:
    global _row_before
    import torch.distributed

    rank, port, world_size, timeout_s, backend, path = head
    sys.path[:] = path
    _row_before = _last_row()
    loaded: list[Any] = []

    def load() -> str:
        loaded.extend((*pickle.loads(task), _registered(backend)))
        return LOADED

    def run() -> Any:
        fn, args, name = loaded
        _join(rank, port, world_size, timeout_s, name)
        return fn(rank, world_size, *args)

    pipe.send_bytes(_answer_of(load))
    if loaded and pipe.recv_bytes() == b"go":
        pipe.send_bytes(_answer_of(run))
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _answer_of(call: Callable[[], Any]) -> bytes:
    """(kind, time, value or exception, traceback) of a call, pickled."""
    try:
        return pickle.dumps(("done", time.monotonic(), call(), ""))
    except BaseException as error:  # a worker must report whatever happened and live on
        at_s, text = time.monotonic(), traceback.format_exc()
        try:
            answer = pickle.dumps(("failed", at_s, error, text))
            pickle.loads(answer)
        except Exception:  # not every exception survives pickling
            answer = pickle.dumps(("failed", at_s, None, text))
        return answer


def _registered(backend: str | None) -> str | None:
    """The backend's name in torch, after it is made known there."""
    if backend is None or not backend.startswith("logged_"):
        return backend
    from phalanx.worlds.logged_group import backend_name

    return backend_name(backend.removeprefix("logged_"))


def _join(rank: int, port: int, world_size: int, timeout_s: float, backend: str | None) -> None:
    global _store
    import torch
    import torch.distributed

    torch.manual_seed(1234 + rank)
    random.seed(1234 + rank)
    timeout = timedelta(seconds=timeout_s + 2 * GRACE_S)
    _store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    if backend is not None:
        torch.distributed.init_process_group(
            backend, store=_store, rank=rank, world_size=world_size, timeout=timeout
        )


def _answer(answers: Connection, main_thread: int) -> None:
    """Tell where the main thread is; works while that hangs in native code."""
    while True:
        try:
            answers.recv()
            stack = traceback.format_stack(sys._current_frames()[main_thread], limit=6)
            answers.send(f"{_last_collective()}\n{''.join(stack)}")
        except (EOFError, OSError):
            return


def _last_row() -> Any:
    module = sys.modules.get("phalanx.worlds.comm_log")
    return None if module is None else module.last_row()


def _last_collective() -> str:
    row = _last_row()
    return f"last collective: {'none logged' if row is _row_before else row}"
