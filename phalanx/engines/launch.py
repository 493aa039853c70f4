"""Several processes of one role on this machine, for runs without torchrun. No torch.

It sets what torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT), so the processes cannot tell the difference.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from phalanx.errors import WorldError

GRACE_S = 5.0  # for the others to end by themselves once a rank has failed
_TAIL_LINES = 12


def launch_local(
    module: str,
    arguments: Sequence[str],
    num_processes: int,
    *,
    on_line: Callable[[str], None] | None = None,
    timeout_s: float | None = None,
) -> None:
    """Run `python -m module arguments` as `num_processes` ranks and wait for all of them.

    Args:
        on_line: gets each line that rank 0 prints, while it runs.
        timeout_s: for the whole; None: no limit.

    Raises:
        WorldError: `world/failed` or `world/dead` with the end of what the first failing rank
            wrote to its standard error, `world/timeout` naming the ranks that still ran. All
            ranks have ended when it is raised.
    """
    with _reserved_port() as port:
        ranks = [
            _Rank(module, arguments, rank, num_processes, port, on_line if rank == 0 else None)
            for rank in range(num_processes)
        ]
        try:
            failed = _wait(ranks, timeout_s)
        finally:
            for each in ranks:
                each.stop()
    if failed is not None:
        raise failed.error()


@contextmanager
def _reserved_port() -> Iterator[int]:
    """A port that nobody else is given while the block runs, and that rank 0 may listen on."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


class _Rank:
    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        rank: int,
        num_processes: int,
        port: int,
        on_line: Callable[[str], None] | None,
    ) -> None:
        self.rank = rank
        world = {"WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes}
        place = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {name: str(value) for name, value in (world | place).items()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._readers = [
            threading.Thread(target=_read, args=(self.process.stdout, on_line), daemon=True),
            threading.Thread(target=_read, args=(self.process.stderr, self._note), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _note(self, line: str) -> None:
        if not line.startswith("USDT:"):  # torch's profiler announces itself
            self.tail.append(line)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join(timeout=GRACE_S)

    def error(self) -> WorldError:
        code = self.process.returncode
        detail = "\n".join(self.tail)
        if code < 0:
            rule = f"was ended by signal {-code}"
            return WorldError("world/dead", f"rank {self.rank}", None, rule, detail=detail)
        # a rank that knows what is wrong says so in its last line: "code: sentence"
        last = self.tail[-1] if self.tail else f"exit code {code}"
        detail = "" if code == 2 else detail
        return WorldError("world/failed", f"rank {self.rank}", None, last, detail=detail)


def _read(stream, on_line: Callable[[str], None] | None) -> None:
    with stream:
        for line in stream:
            if on_line is not None:
                on_line(line.rstrip("\n"))


def _wait(ranks: Sequence[_Rank], timeout_s: float | None) -> _Rank | None:
    """Until all have ended, or a rank failed and the others had their grace."""
    end_s = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
    failed: _Rank | None = None
    while any(each.process.poll() is None for each in ranks):
        if time.monotonic() > end_s:
            if failed is not None:
                return failed
            running = [each.rank for each in ranks if each.process.poll() is None]
            rule = f"did not end within {timeout_s:g} s"
            raise WorldError("world/timeout", f"ranks {running}", None, rule)
        if failed is None:
            failed = _first_failed(ranks)
            end_s = min(end_s, time.monotonic() + GRACE_S) if failed else end_s
        time.sleep(0.02)
    return failed or _first_failed(ranks)


def _first_failed(ranks: Sequence[_Rank]) -> _Rank | None:
    return next((each for each in ranks if each.process.poll() not in (None, 0)), None)
