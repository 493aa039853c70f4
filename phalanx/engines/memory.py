"""Memory of this process as the kernel and the C library see it. No torch.

PSS counts a page that several processes map (libraries, memory-mapped data) by its share, so the
sum over processes is what the machine holds. Its peak costs nothing to know: the kernel keeps the
high-water mark of RSS (VmHWM), and what RSS counts too often is all but constant.

Source: proc(5), proc_pid_smaps(5); mallinfo2(3) of glibc 2.33.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_SELF = Path("/proc/self")
_LARGE_BYTES = 2 << 20
_WORTH_ROOM_BYTES = 32 << 20  # looking for free pages takes as long as filling so much
_M_MMAP_THRESHOLD = -3  # malloc.h


@dataclass(frozen=True)
class ProcessBytes:
    """A process's memory now.

    Attributes:
        pss: pages, shared ones by their share.
        rss: pages, shared ones whole.
        peak_rss: the most that `rss` was since `restart_peak`.
        used: what the C library has handed out and not got back.
        unused: what it keeps for later instead of giving it back to the system.
    """

    pss: int
    rss: int
    peak_rss: int
    used: int
    unused: int

    @property
    def peak_pss(self) -> int:
        """The most that `pss` was since `restart_peak`, if as much was shared then as now."""
        return self.peak_rss - (self.rss - self.pss)


def process_bytes() -> ProcessBytes:
    """This process now; takes some milliseconds, so not for the step path."""
    rollup, status = _fields("smaps_rollup"), _fields("status")
    used, unused = _allocated()
    return ProcessBytes(rollup["Pss"], rollup["Rss"], status["VmHWM"], used, unused)


def restart_peak() -> None:
    """`peak_rss` begins anew, see proc(5)."""
    (_SELF / "clear_refs").write_text("5")


def return_large_blocks() -> None:
    """Blocks of 2 MiB and more go back to the system as soon as they are freed.

    glibc otherwise raises that limit up to 32 MiB, to the size of any block that was freed once.
    Buffers of gathered units and gradients then leave holes between blocks that live on: a third of
    what a training process held (docs/performance.md).

    Source: mallopt(3), M_MMAP_THRESHOLD; other C libraries are left as they are.
    """
    mallopt = _libc_function("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def return_free_memory() -> None:
    """What freed small blocks left behind goes back to the system; some milliseconds.

    Rows of different lengths leave holes of different sizes in the heap, which grew over the first
    steps to 300 MB of a process (docs/performance.md).

    Source: malloc_trim(3); other C libraries are left as they are.
    """
    trim = _libc_function("malloc_trim")
    if trim is not None:
        trim(0)


def make_room(num_bytes: int) -> None:
    """Before a block of `num_bytes` is taken in the midst of a backward pass, on the CPU.

    A large block is mapped on its own and cannot use what small ones have left in the heap: at the
    end of a pass that is all its activations, 500 MB of a process that trains Gemma 3 270M.
    """
    if num_bytes >= _WORTH_ROOM_BYTES:
        return_free_memory()


def _fields(name: str) -> dict[str, int]:
    """The lines "Name: 12 kB" of a file in /proc/self, in bytes."""
    found = {}
    for line in (_SELF / name).read_text().splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "kB":
            found[words[0].rstrip(":")] = int(words[1]) * 1024
    return found


class _MallInfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
        )
    )


@cache
def _libc_function(name: str):
    """A function of the C library; None where it has none."""
    return getattr(ctypes.CDLL(None), name, None)


def _allocated() -> tuple[int, int]:
    info = _libc_function("mallinfo2")
    if info is None:  # another C library: nothing known
        return 0, 0
    info.restype = _MallInfo
    found = info()
    return found.uordblks + found.hblkhd, found.fordblks
