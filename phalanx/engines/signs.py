"""What each rank of a run writes about itself while it runs: one small file per rank. No torch.

`RUN/watch/rank-00001.json` holds the newest `Sign` of rank 1, `rank-00001.txt` its stacks once
somebody asked for them. Files outlive the process that wrote them, and need no store to be read.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = "watch"
DUMP_REQUEST = "dump"  # ranks on other hosts cannot be sent a signal; they look for this file
DUMP_SIGNAL = signal.SIGQUIT  # as of old: what a process does now, and it goes on
RUNS, ENDED, FAILED = "runs", "ended", "failed"


@dataclass(frozen=True, kw_only=True)
class Sign:
    """A sign of life.

    Attributes:
        beat: counts the signs of this process.
        step: that runs; -1 before the first.
        part: of it: "data", "load", "evaluate", "step" ...; part_s: for so long already;
            longest_s: an earlier one of this name took so long (0: there was none).
        num_parts: parts begun so far.
        cpu_s: processor time so far, all threads.
        num_collectives: communication operations begun so far.
        last_collective: the newest one in words; "" before the first.
        state: `RUNS`, `ENDED` or `FAILED`; then `error` in words and when, by the host's clock.
    """

    rank: int
    host: str
    pid: int
    beat: int
    step: int
    part: str
    part_s: float
    longest_s: float
    num_parts: int
    cpu_s: float
    num_collectives: int
    last_collective: str
    state: str = RUNS
    error: str = ""
    failed_at_s: float = 0.0

    def place(self) -> str:
        """Where it is, in words."""
        step = "before step 1" if self.step < 0 else f"in step {self.step + 1}"
        last = self.last_collective or "none yet"
        return f"{step} ({self.part or 'start'}); last collective: {last}"

    def is_here(self) -> bool:
        """Whether its process runs on this host."""
        return self.host == socket.gethostname()


def sign_path(folder: Path, rank: int) -> Path:
    """Where a rank's sign lies, below a run folder."""
    return folder / FOLDER / f"rank-{rank:05}.json"


def stack_path(folder: Path, rank: int) -> Path:
    """Where a rank's stacks lie."""
    return sign_path(folder, rank).with_suffix(".txt")


def write_sign(folder: Path, sign: Sign) -> None:
    """Write a sign in place: who opens the file next sees it, on network file systems too."""
    text = json.dumps(asdict(sign)).encode() + b"\n"
    handle = os.open(sign_path(folder, sign.rank), os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.pwrite(handle, text, 0)
        os.ftruncate(handle, len(text))
    finally:
        os.close(handle)


def read_sign(folder: Path, rank: int) -> Sign | None:
    """The newest sign of a rank; None if there is none, or it is being written."""
    try:
        return Sign(**json.loads(sign_path(folder, rank).read_bytes()))
    except (OSError, ValueError, TypeError):  # TypeError: half of an older, longer sign
        return None


def forget_signs(folder: Path) -> None:
    """Remove what an earlier run left."""
    for path in (folder / FOLDER).glob("rank-*"):
        path.unlink(missing_ok=True)
    (folder / FOLDER / DUMP_REQUEST).unlink(missing_ok=True)


def ask_for_stacks(folder: Path, num_ranks: int) -> None:
    """Have every rank that still runs write its stacks, also one that a signal has stopped."""
    away = False
    for rank in range(num_ranks):
        sign = read_sign(folder, rank)
        if sign is None or sign.state != RUNS:
            continue
        if not sign.is_here():
            away = True
            continue
        try:
            os.kill(sign.pid, DUMP_SIGNAL)
            os.kill(sign.pid, signal.SIGCONT)
        except (ProcessLookupError, PermissionError):
            continue  # it has ended meanwhile
    if away:
        (folder / FOLDER / DUMP_REQUEST).touch()


def lack_stacks(folder: Path, num_ranks: int) -> bool:
    """Whether a rank that still runs has written no stacks yet."""
    signs = (read_sign(folder, rank) for rank in range(num_ranks))
    running = (sign for sign in signs if sign is not None and sign.state == RUNS)
    return any(_is_empty(stack_path(folder, sign.rank)) for sign in running)


def _is_empty(path: Path) -> bool:
    try:
        return path.stat().st_size == 0
    except OSError:
        return False  # who took it away will not read it
