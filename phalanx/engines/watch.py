"""The watch of one rank: signs of life, stacks on request, and a look at the others.

    with Watch(folder, rank, num_ranks, hang_s=25.0) as watch:
        watch.note(-1, "load")
        ...
        watch.note(step, "step")

Under `launch_local` the launcher looks at the signs; under any other launcher (torchrun, Slurm) the
first and the last rank do, say in one line who died or hangs, and end themselves, upon which the
launcher ends the rest.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from phalanx.engines.hang import Finding, Monitor
from phalanx.engines.launch import LAUNCHER_VARIABLE
from phalanx.engines.signs import (
    DUMP_REQUEST,
    DUMP_SIGNAL,
    ENDED,
    FAILED,
    FOLDER,
    RUNS,
    Sign,
    stack_path,
    write_sign,
)
from phalanx.errors import PhalanxError
from phalanx.worlds import comm_log

_HANG_EXIT = 1
_NOTE_EVERY_S = 0.05  # a sign takes 0.03 ms on a local disk
_SPARED = 200  # notes write for at most this part of the time
_WORDS_S = 2.0  # for the others to write their stacks, or for a death to be seen
_SECOND_S = 3.0  # by which the last rank lets the first one report


class Watch:
    """Signs of life of this rank.

    Args:
        folder: run folder, shared by all ranks.
        rank, num_ranks: of the role.
        hang_s: silence after which a rank counts as hung.
    """

    def __init__(self, folder: str | Path, rank: int, num_ranks: int, *, hang_s: float) -> None:
        self.folder, self.rank, self.num_ranks = Path(folder), rank, num_ranks
        self._every_s = min(1.0, hang_s / 10)
        self._beat = self._num_parts = 0
        self._written_s, self._write_s = float("-inf"), 0.0
        self._step, self._part, self._since_s = -1, "", time.monotonic()
        self._longest_s: dict[str, float] = {}
        self._state, self._error, self._failed_at_s = RUNS, "", 0.0
        self._over = threading.Event()
        self._writing = threading.Lock()
        self._monitor: Monitor | None = None
        watches = LAUNCHER_VARIABLE not in os.environ and num_ranks > 1
        if watches and rank in (0, num_ranks - 1):
            patience_s = hang_s if rank == 0 else hang_s + _SECOND_S
            self._monitor = Monitor(self.folder, num_ranks, patience_s)

    def __enter__(self) -> Watch:
        (self.folder / FOLDER).mkdir(parents=True, exist_ok=True)
        self._stacks = stack_path(self.folder, self.rank).open("w")
        faulthandler.register(DUMP_SIGNAL, self._stacks, all_threads=True, chain=False)
        self._write()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.failed(error)
        elif self._state == RUNS:
            self._state = ENDED
        self._over.set()
        self._thread.join()
        self._write()
        faulthandler.unregister(DUMP_SIGNAL)
        self._stacks.close()

    def note(self, step: int, part: str) -> None:
        """This rank begins a part of a step (-1: before the first)."""
        now_s = time.monotonic()
        took_s, before = now_s - self._since_s, self._part
        self._longest_s[before] = max(self._longest_s.get(before, 0.0), took_s)
        self._step, self._part, self._since_s = step, part, now_s
        self._num_parts += 1
        # a rank that dies now leaves fresh words; slow file systems are spared
        if now_s - self._written_s > max(_NOTE_EVERY_S, _SPARED * self._write_s):
            self._write()

    def failed(self, error: BaseException) -> None:
        """This rank ends with an error; to be called before it leaves its process group.

        A rank that only lost its partner says who that was, under launchers that do not.
        """
        if self._state == FAILED:
            return
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        if isinstance(error, PhalanxError):
            words = f"{error.code}: {error.sentence()}".splitlines()[0]
        self._state, self._error, self._failed_at_s = FAILED, words, time.time()
        self._write()
        if not isinstance(error, PhalanxError):
            self._name_the_cause()

    def _name_the_cause(self) -> None:
        """Print who died or failed before this rank did; the first survivor that watches does."""
        if self._monitor is None:
            return
        end_s = time.monotonic() + _WORDS_S
        while time.monotonic() < end_s:
            found = self._monitor.dead()
            if found is not None and not found.where.startswith(f"rank {self.rank} "):
                self._say(found)
                return
            time.sleep(0.1)

    def _run(self) -> None:
        request = self.folder / FOLDER / DUMP_REQUEST
        asked = False
        while not self._over.wait(self._every_s):
            self._write()
            if not asked and request.exists():
                asked = True
                faulthandler.dump_traceback(self._stacks, all_threads=True)
            if self._monitor is not None and (found := self._monitor.poll()):
                self._end(found)

    def _end(self, found: Finding) -> None:
        """End this process: whoever started the ranks then ends the others."""
        assert self._monitor is not None
        self._say(found)
        self._monitor.gather_stacks(_WORDS_S)
        os._exit(_HANG_EXIT)

    def _say(self, found: Finding) -> None:
        error = found.error()
        print(f"error[{error.code}]: {error.sentence()}", file=sys.stderr, flush=True)

    def _write(self) -> None:
        with self._writing:
            self._beat += 1
            start_s = time.monotonic()
            with suppress(OSError):  # a disk that is full for a while ends no run
                write_sign(self.folder, self._sign())
            self._written_s = time.monotonic()
            # doubled at most, so that one write that was held up does not count
            self._write_s = min(self._written_s - start_s, max(2 * self._write_s, 1e-5))

    def _sign(self) -> Sign:
        return Sign(
            rank=self.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            beat=self._beat,
            step=self._step,
            part=self._part,
            part_s=time.monotonic() - self._since_s,
            longest_s=self._longest_s.get(self._part, 0.0),
            num_parts=self._num_parts,
            cpu_s=time.process_time(),
            num_collectives=comm_log.num_issued(),
            last_collective=comm_log.last_collective() or "",
            state=self._state,
            error=self._error,
            failed_at_s=self._failed_at_s,
        )
