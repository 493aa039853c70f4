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
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING

from phalanx.errors import WorldError

if TYPE_CHECKING:
    from phalanx.engines.hang import Monitor

LAUNCHER_VARIABLE = "PHALANX_LAUNCHER"  # process id of the launcher, for its ranks
GRACE_S = 5.0  # for the others to end by themselves once a rank has failed
_TAIL_LINES = 12
_STACKS_S = 1.0  # at least, for ranks to write their stacks
# Of an outer launcher; ranks that saw them would look for its store.
_OUTER = (
    *("TORCHELASTIC_", "SLURM_", "PMI_", "PMIX_", "OMPI_"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
)
# gloo asks the name server who 127.0.0.1 is at each connection; one that is silent costs 5 s
RESOLVER = {"RES_OPTIONS": "timeout:1 attempts:1"}
# Threads of one process that spin at barriers keep a core from what they wait for: with one other
# busy program a decode step of a server took 2.4 s spinning and 0.16 s asleep. Kept from outside.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}
# Kernels that oneDNN keeps, read when the first is made. With documents of all lengths its default
# of 1,024 grows to 0.6 GB a process, with AMX beyond; 128 hold those that come back and cost no
# measurable time.
KERNEL_CACHE = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}


def launch_local(
    module: str,
    arguments: Sequence[str],
    num_processes: int,
    *,
    on_line: Callable[[str], None] | None = None,
    timeout_s: float | None = None,
    stop_s: float = GRACE_S,
    monitor: Monitor | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run `python -m module arguments` as `num_processes` ranks and wait for all of them.

    Args:
        on_line: gets each line that rank 0 prints, while it runs.
        timeout_s: for the whole; None: no limit.
        stop_s: for ranks that were told to stop (SIGTERM) until they are killed.
        monitor: looks for ranks that hang, of ranks that keep a `watch.Watch`.
        environment: variables of the ranks where this process has none of the name.

    Raises:
        WorldError: `world/failed` or `world/dead` with the end of what the first failing rank
            wrote to its standard error, `world/timeout` naming the ranks that still ran or hang.
        KeyboardInterrupt: this process got SIGINT or SIGTERM, and the ranks did not fail.

    All ranks have ended when it returns or raises.
    """
    with _reserved_port() as port:
        ranks: list[_Rank] = []
        try:
            with _stop_requests(ranks) as requests:
                for rank in range(num_processes):
                    hear = on_line if rank == 0 else None
                    ranks.append(
                        _Rank(module, arguments, rank, num_processes, port, hear, environment)
                    )
                failed = _Wait(ranks, requests, monitor).until_ended(timeout_s, stop_s)
        finally:
            for each in ranks:
                each.stop()
    if failed is not None:
        raise failed.error(monitor)
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
        defaults: Mapping[str, str],
    ) -> None:
        self.rank = rank
        world = {"WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes}
        place = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {name: str(value) for name, value in (world | place).items()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "phalanx.engines.child", module, *arguments],
            env={**defaults, **rank_environment(os.environ), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,  # Ctrl-C reaches only the launcher
        )
        self.was_cut_off = False  # by this process, before it had ended
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
            self.tail.append(line.removeprefix(f"[rank{self.rank}]: "))  # torch.distributed

    def send(self, number: int) -> None:
        """Send a signal if it still runs."""
        if self.code is None:
            self.process.send_signal(number)

    def stop(self) -> None:
        self.was_cut_off = self.code is None
        self.send(signal.SIGKILL)
        self.process.wait()
        for reader in self._readers:
            reader.join(timeout=GRACE_S)

    def error(self, monitor: Monitor | None) -> WorldError:
        """Why it failed, and where it was."""
        code, sign = self.process.returncode, monitor.last_sign(self.rank) if monitor else None
        detail = "\n".join(self.tail)
        where = f"rank {self.rank}" + (f" on {sign.host}" if sign else "")
        if sign is not None and self.was_cut_off:
            rule = f"{sign.error}; {sign.place()}"
            return WorldError("world/failed", where, None, rule, detail=detail)
        if code < 0:
            rule = f"was ended by signal {-code} ({signal.Signals(-code).name})"
            rule += f"; {sign.place()}" if sign else ""
            return WorldError("world/dead", where, None, rule, detail=detail)
        # a rank that knows what is wrong says so in its last line: "code: sentence"
        last = self.tail[-1] if self.tail else f"exit code {code}"
        if code == 2:
            return WorldError("world/failed", f"rank {self.rank}", None, last)
        last += f"; {sign.place()}" if sign else ""
        return WorldError("world/failed", where, None, last, detail=detail)


def _read(stream, on_line: Callable[[str], None] | None) -> None:
    with stream:
        try:
            for line in stream:
                if on_line is not None:
                    on_line(line.rstrip("\n"))
        finally:  # who can show no line any more must not keep the rank from writing it
            for _ in stream:
                pass


class _Wait:
    """Until all ranks have ended, or one failed and the others had their grace."""

    def __init__(
        self, ranks: Sequence[_Rank], requests: Sequence[int], monitor: Monitor | None
    ) -> None:
        self.ranks, self.requests, self.monitor = ranks, requests, monitor
        self.failed: list[_Rank] = []  # in the order in which it was seen

    def until_ended(self, timeout_s: float | None, stop_s: float) -> _Rank | None:
        """The rank that failed first, if any did."""
        end_s = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        stopping = False
        while any(each.code is None for each in self.ranks):
            if time.monotonic() > end_s:
                if not self.failed:
                    raise self._overdue(stop_s if stopping else timeout_s)
                break
            if self.requests and not stopping:
                stopping, end_s = True, min(end_s, time.monotonic() + stop_s)
            if self._note_failures() and len(self.failed) == 1:
                end_s = min(end_s, time.monotonic() + GRACE_S)
            if not self.failed:
                self._look_for_hangs()
            time.sleep(0.02)
        self._note_failures()
        return self._first()

    def _note_failures(self) -> bool:
        """Whether ranks have failed since the last call."""
        fine = (None, 0, *((-signal.SIGTERM, -signal.SIGKILL) if self.requests else ()))
        new = [e for e in self.ranks if e not in self.failed and e.code not in fine]
        if new and not self.failed and self.monitor is not None:
            self.monitor.ask_for_stacks()
        self.failed += new
        return bool(new)

    def _first(self) -> _Rank | None:
        """The cause: a rank that a signal ended, or the one that noted an error first, though it
        may take longer to end than those whom it left alone."""
        if not self.failed:
            return None
        for each in self.failed:
            if each.code is not None and each.code < 0:
                return each
        noted = self.monitor.failed_at_s if self.monitor else lambda rank: float("inf")
        return min([*self.failed, *self.ranks], key=lambda each: noted(each.rank))

    def _look_for_hangs(self) -> None:
        found = self.monitor.poll() if self.monitor else None
        if found is not None and self.monitor is not None:
            self.monitor.gather_stacks(_STACKS_S)
            raise found.error()

    def _overdue(self, limit_s: float | None) -> WorldError:
        running = [each.rank for each in self.ranks if each.code is None]
        rule = f"did not end within {limit_s:g} s"
        return WorldError("world/timeout", f"ranks {running}", None, rule)
