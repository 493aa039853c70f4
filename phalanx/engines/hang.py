"""Does every rank of a run still get on? From the signs that ranks write (`signs`). No torch.

Slow is no hang: a rank that computes, reads from a disk or starts new parts is left alone. A rank
hangs when its process is stopped by a signal, or shows no sign from another host; or when no rank
has got on for `hang_s` and it is the one that others wait for (fewest collectives begun) while it
neither computes nor reads. A rank that computes in a step while all others wait is called hung only
after ten times `hang_s` and twenty times its longest step so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.engines.signs import FOLDER, RUNS, Sign, ask_for_stacks, lack_stacks, read_sign
from phalanx.errors import WorldError

_BUSY_FRAC, _BUSY_S = 0.02, 0.03  # processor time above which a rank computes
_BUSY_HANGS, _BUSY_PARTS = 10.0, 20.0  # when a rank that computes counts as hung
_STACKS_S = 10.0  # for the last rank to write its stacks
_PAUSE_S = 5.0  # without a look, for instance because this process was stopped too


@dataclass(frozen=True)
class Vital:
    """What the kernel says of a process: state letter of its main thread, its processor seconds."""

    state: str
    cpu_s: float


def vital_of(pid: int) -> Vital | None:
    """Of a process on this host, see proc(5); None if it has ended."""
    words = _words(Path(f"/proc/{pid}/stat"))
    if words is None or words[0] in "ZX":
        return None
    return Vital(words[0], (int(words[11]) + int(words[12])) / _TICKS_PER_S)


def waits_for_disk(pid: int) -> bool:
    """Whether a thread of a process on this host is in the kernel's uninterruptible sleep."""
    found = (_words(path) for path in Path(f"/proc/{pid}/task").glob("*/stat"))
    return any(words is not None and words[0] == "D" for words in found)


def _words(path: Path) -> list[str] | None:
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return None


_TICKS_PER_S = 100  # USER_HZ, fixed by the kernel's interface


@dataclass(frozen=True)
class Finding:
    """Ranks that died or hang.

    Attributes:
        code: "world/dead" or "world/timeout".
        where: rank and host.
        cause: what is known, in one sentence.
    """

    code: str
    where: str
    cause: str
    folder: Path

    def error(self) -> WorldError:
        """To be raised by who watches."""
        detail = f"stacks of all ranks: {self.folder / FOLDER}/rank-*.txt"
        if self.code == "world/timeout":
            detail += "; a larger plan.hang_s waits longer"
        return WorldError(self.code, self.where, None, self.cause, detail=detail)


class _View:
    """What has been seen of one rank."""

    def __init__(self) -> None:
        self.sign: Sign | None = None
        self.vital: Vital | None = None
        self.is_live = False  # a second sign has come, so this is no file of an earlier run
        self.beat_s = self.progress_s = self.active_s = self.cpu_s = 0.0

    @property
    def is_stopped(self) -> bool:
        """Whether a signal keeps its process from running."""
        return self.vital is not None and self.vital.state in "Tt"

    def restart(self, now_s: float) -> None:
        """Nothing is known before now."""
        self.beat_s = self.progress_s = self.active_s = now_s

    def see(self, sign: Sign, vital: Vital | None, now_s: float) -> None:
        """Take in a sign and what the kernel says."""
        old, self.sign = self.sign, sign
        if old is None or old.pid != sign.pid:
            self.is_live = False
            self.restart(now_s)
        elif old.beat != sign.beat:
            self.is_live, self.beat_s = True, now_s
        if old is None or _progress(old) != _progress(sign):
            self.progress_s = now_s
        self._see_work(vital, now_s)

    def _see_work(self, vital: Vital | None, now_s: float) -> None:
        self.vital = vital
        if vital is None:
            return
        worked_s = vital.cpu_s - self.cpu_s
        if worked_s > _BUSY_FRAC * (now_s - self.active_s) + _BUSY_S:
            self.active_s, self.cpu_s = now_s, vital.cpu_s


def _progress(sign: Sign) -> tuple[int, int]:
    return sign.num_collectives, sign.num_parts


class Monitor:
    """Watches the ranks of a run.

    Args:
        folder: run folder.
        hang_s: silence after which a rank counts as hung.
        clock, vital, on_disk: for tests.
    """

    def __init__(
        self,
        folder: str | Path,
        num_ranks: int,
        hang_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        vital: Callable[[int], Vital | None] = vital_of,
        on_disk: Callable[[int], bool] = waits_for_disk,
    ) -> None:
        self.folder, self.hang_s = Path(folder), hang_s
        self._clock, self._vital, self._on_disk = clock, vital, on_disk
        self._views = [_View() for _ in range(num_ranks)]
        self._every_s = min(1.0, hang_s / 10)
        self._looked_s = self._clock()

    def poll(self) -> Finding | None:
        """Look at all ranks, if some time has passed since; what is wrong with them."""
        now_s = self._clock()
        since_s = now_s - self._looked_s
        if since_s < self._every_s:
            return None
        self._looked_s = now_s
        if since_s > self._every_s + _PAUSE_S:
            for view in self._views:
                view.restart(now_s)
        self._look(now_s)
        return self._silent(now_s) or self._stuck(now_s)

    def dead(self) -> Finding | None:
        """A rank whose process on this host has ended without a word, or that failed first."""
        signs = [sign for rank in range(len(self._views)) if (sign := self.last_sign(rank))]
        for sign in signs:
            if sign.state == RUNS and sign.is_here() and self._vital(sign.pid) is None:
                return self._finding("world/dead", sign, "has died")
        failed = [sign for sign in signs if sign.error]
        if not failed:
            return None
        first = min(failed, key=lambda sign: sign.failed_at_s)
        return self._finding("world/failed", first, f"failed first: {first.error}")

    def last_sign(self, rank: int) -> Sign | None:
        """The newest sign of a rank, as it lies in the folder."""
        return read_sign(self.folder, rank)

    def failed_at_s(self, rank: int) -> float:
        """When a rank noted its own error; infinite if it did not."""
        sign = self.last_sign(rank)
        return sign.failed_at_s if sign is not None and sign.error else float("inf")

    def ask_for_stacks(self) -> None:
        """Have all ranks write where they are."""
        ask_for_stacks(self.folder, len(self._views))

    def gather_stacks(self, least_s: float) -> None:
        """The same, and wait until they have: so long at least, longer on a busy machine."""
        self.ask_for_stacks()
        time.sleep(least_s)
        end_s = time.monotonic() + _STACKS_S
        while lack_stacks(self.folder, len(self._views)) and time.monotonic() < end_s:
            time.sleep(0.05)

    def _look(self, now_s: float) -> None:
        for rank, view in enumerate(self._views):
            sign = self.last_sign(rank)
            if sign is not None:
                here = self._vital(sign.pid) if sign.is_here() else Vital("S", sign.cpu_s)
                view.see(sign, here, now_s)
                # asked only of ranks that look idle, as it reads a file per thread
                idle = now_s - view.active_s > self.hang_s / 2
                if idle and sign.is_here() and self._on_disk(sign.pid):
                    view.active_s = now_s

    def _running(self) -> list[_View]:
        return [v for v in self._views if v.is_live and v.sign and v.sign.state == RUNS]

    def _silent(self, now_s: float) -> Finding | None:
        for view in self._running():
            assert view.sign is not None
            silent_s = now_s - view.beat_s
            if silent_s < self.hang_s:
                continue
            if not view.sign.is_here():
                cause = f"has shown no sign of life for {silent_s:.0f} s"
                return self._finding("world/timeout", view.sign, cause)
            if view.is_stopped:
                cause = f"has been stopped by a signal for {silent_s:.0f} s"
                return self._finding("world/timeout", view.sign, cause)
        return None

    def _stuck(self, now_s: float) -> Finding | None:
        """When nobody gets on: the rank that the others wait for."""
        views = self._running()
        signs = [view.sign for view in views if view.sign is not None]
        if not 1 < len(views) == len(self._views):
            return None  # nobody waits for anybody, or some are starting or ending
        if not any(sign.num_collectives for sign in signs):
            return None
        stuck_s = now_s - max(view.progress_s for view in views)
        if stuck_s < self.hang_s:
            return None
        least = min(sign.num_collectives for sign in signs)
        behind = [view for view in views if view.sign and view.sign.num_collectives == least]
        idle = [view for view in behind if now_s - view.active_s >= self.hang_s]
        if len(behind) == len(views) and len(idle) < len(views):
            return None  # all are at the same place, and some compute
        if idle:
            return self._idle(idle, views, stuck_s)
        return self._busy(behind, stuck_s)

    def _idle(
        self, idle: Sequence[_View], views: Sequence[_View], stuck_s: float
    ) -> Finding | None:
        culprit = next((view for view in idle if view.is_stopped), idle[0])
        sign = culprit.sign
        assert sign is not None
        if culprit.is_stopped:  # its last sign may be newer than what anybody else did
            cause = f"has been stopped by a signal while others have waited for {stuck_s:.0f} s"
        elif len(idle) == len(views):
            cause = f"and all other ranks have waited for one another for {stuck_s:.0f} s"
        else:
            cause = f"has done nothing for {stuck_s:.0f} s while others wait for it"
        return self._finding("world/timeout", sign, cause)

    def _busy(self, behind: Sequence[_View], stuck_s: float) -> Finding | None:
        """One that computes, in a part that it has ended before, far longer than ever."""
        sign = behind[0].sign
        assert sign is not None
        limit_s = max(_BUSY_HANGS * self.hang_s, _BUSY_PARTS * sign.longest_s)
        if sign.part != "step" or not sign.longest_s or min(sign.part_s, stuck_s) < limit_s:
            return None
        cause = (
            f"has computed for {sign.part_s:.0f} s in a step (the longest so far took "
            f"{sign.longest_s:.3g} s) while others wait for it"
        )
        return self._finding("world/timeout", sign, cause)

    def _finding(self, code: str, sign: Sign, cause: str) -> Finding:
        return Finding(
            code, f"rank {sign.rank} on {sign.host}", f"{cause}; {sign.place()}", self.folder
        )
