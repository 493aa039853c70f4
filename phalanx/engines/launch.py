"""Several processes of one role on this machine, for runs without torchrun. No torch.

It sets what torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT), so the processes cannot tell the difference. They end with this process, however it
ends, and hear of Ctrl-C and SIGTERM from it alone.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from phalanx.errors import WorldError

LAUNCHER_VARIABLE = "PHALANX_LAUNCHER"  # process id of the launcher, for its ranks
GRACE_S = 5.0  # for the others to end by themselves once a rank has failed
_TAIL_LINES = 12
# Of an outer launcher; ranks that saw them would look for its store.
_OUTER = ("TORCHELASTIC_", "GROUP_", "ROLE_", "SLURM_", "PMI", "OMPI_", "ACCELERATE_")
# gloo asks the name server who 127.0.0.1 is at each connection; one that is silent costs 5 s
RESOLVER = {"RES_OPTIONS": "timeout:1 attempts:1"}


def launch_local(
    module: str,
    arguments: Sequence[str],
    num_processes: int,
    *,
    on_line: Callable[[str], None] | None = None,
    timeout_s: float | None = None,
    stop_s: float = GRACE_S,
) -> None:
    """Run `python -m module arguments` as `num_processes` ranks and wait for all of them.

    Args:
        on_line: gets each line that rank 0 prints, while it runs.
        timeout_s: for the whole; None: no limit.
        stop_s: for ranks that were told to stop (SIGTERM) until they are killed.

    Raises:
        WorldError: `world/failed` or `world/dead` with the end of what the first failing rank
            wrote to its standard error, `world/timeout` naming the ranks that still ran.
        KeyboardInterrupt: this process got SIGINT or SIGTERM, and the ranks did not fail.

    All ranks have ended when it returns or raises.
    """
    with _reserved_port() as port:
        ranks: list[_Rank] = []
        try:
            with _stop_requests(ranks) as requests:
                for rank in range(num_processes):
                    hear = on_line if rank == 0 else None
                    ranks.append(_Rank(module, arguments, rank, num_processes, port, hear))
                failed = _wait(ranks, timeout_s, requests, stop_s)
        finally:
            for each in ranks:
                each.stop()
    if failed is not None:
        raise failed.error()
    if requests:
        raise KeyboardInterrupt


def rank_environment(outer: Mapping[str, str]) -> dict[str, str]:
    """What a rank keeps of this process' environment: nothing of an outer launcher."""
    kept = {name: value for name, value in outer.items() if not name.startswith(_OUTER)}
    return RESOLVER | kept | {LAUNCHER_VARIABLE: str(os.getpid())}


@contextmanager
def _reserved_port() -> Iterator[int]:
    """A port that nobody else is given while the block runs, and that rank 0 may listen on."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@contextmanager
def _stop_requests(ranks: Sequence[_Rank]) -> Iterator[list[int]]:
    """Pass the first SIGINT or SIGTERM on as SIGTERM; a second one kills. Lists the signals."""
    requests: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        requests.append(number)
        for each in ranks:
            each.send(signal.SIGTERM if len(requests) == 1 else signal.SIGKILL)

    if threading.current_thread() is not threading.main_thread():
        yield requests  # only the main thread can hear signals
        return
    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
            [sys.executable, "-m", "phalanx.engines.child", module, *arguments],
            env=rank_environment(os.environ) | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,  # Ctrl-C reaches only the launcher
        )
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._readers = [
            threading.Thread(target=_read, args=(self.process.stdout, on_line), daemon=True),
            threading.Thread(target=_read, args=(self.process.stderr, self._note), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self.process.poll()

    def _note(self, line: str) -> None:
        if not line.startswith("USDT:"):  # torch's profiler announces itself
            self.tail.append(line)

    def send(self, number: int) -> None:
        """Send a signal if it still runs."""
        if self.code is None:
            self.process.send_signal(number)

    def stop(self) -> None:
        self.send(signal.SIGKILL)
        self.process.wait()
        for reader in self._readers:
            reader.join(timeout=GRACE_S)

    def error(self) -> WorldError:
        code = self.process.returncode
        detail = "\n".join(self.tail)
        if code < 0:
            rule = f"was ended by signal {-code} ({signal.Signals(-code).name})"
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


def _wait(
    ranks: Sequence[_Rank], timeout_s: float | None, requests: Sequence[int], stop_s: float
) -> _Rank | None:
    """Until all have ended, or a rank failed and the others had their grace."""
    end_s = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
    failed: _Rank | None = None
    stopping = False
    while any(each.code is None for each in ranks):
        if time.monotonic() > end_s:
            if failed is not None:
                return failed
            running = [each.rank for each in ranks if each.code is None]
            rule = f"did not end within {stop_s if stopping else timeout_s:g} s"
            raise WorldError("world/timeout", f"ranks {running}", None, rule)
        if requests and not stopping:
            stopping, end_s = True, min(end_s, time.monotonic() + stop_s)
        if failed is None:
            failed = _first_failed(ranks, stopping)
            end_s = min(end_s, time.monotonic() + GRACE_S) if failed else end_s
        time.sleep(0.02)
    return failed or _first_failed(ranks, bool(requests))


def _first_failed(ranks: Sequence[_Rank], stopping: bool) -> _Rank | None:
    fine = (None, 0, -signal.SIGTERM, -signal.SIGKILL) if stopping else (None, 0)
    return next((each for each in ranks if each.code not in fine), None)
