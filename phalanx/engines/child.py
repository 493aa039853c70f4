"""The first lines of every rank that `launch_local` starts: it ends when its launcher ends.

    python -m phalanx.engines.child MODULE ARGUMENTS    is    python -m MODULE ARGUMENTS

A launcher that is killed cannot take its ranks along, so the kernel does. No torch.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

from phalanx.engines.launch import LAUNCHER_VARIABLE

_PR_SET_PDEATHSIG = 1  # prctl(2); Linux only


def end_with_launcher(launcher: int) -> None:
    """Have the kernel kill this process once the process `launcher`, its parent, has ended."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it ended before it was asked for
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    end_with_launcher(int(os.environ[LAUNCHER_VARIABLE]))
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
