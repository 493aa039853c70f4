"""Starting the processes of a run, and reading what they say. No torch in this process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.engines.events import hear
from phalanx.engines.hang import Monitor
from phalanx.engines.launch import launch_local
from phalanx.engines.signs import forget_signs
from phalanx.errors import WorldError

STOP_S = 600.0  # for ranks that were asked to stop: they save first
_LOG_LINES = 12  # of a failed process, shown in its error


def launch_training(
    folder: Path,
    num_ranks: int,
    on_event: Callable[[Mapping[str, Any]], None],
    *,
    hang_s: float,
    resume: bool = False,
) -> None:
    """Run `phalanx.engines.train` on `num_ranks` local processes.

    Args:
        folder: run folder with job.json and plan.json.
        on_event: called with each event of rank 0, and with what else it prints as one of kind
            "log".
        hang_s: silence after which a rank counts as hung.
        resume: go on from the newest checkpoint of the folder.

    Raises:
        WorldError: from `launch_local`, naming the rank that failed first.
        KeyboardInterrupt: when asked to stop, after the ranks have ended.
    """
    arguments = [str(folder), *(["--resume"] if resume else [])]
    forget_signs(folder)
    launch_local(
        "phalanx.engines.train",
        arguments,
        num_ranks,
        on_line=lambda line: hear(line, on_event),
        stop_s=STOP_S,
        monitor=Monitor(folder, num_ranks, hang_s),
    )


def run_module(module: str, arguments: Sequence[str], given: str = "") -> Any:
    """Run `python -m module arguments` and read its last line of output as JSON.

    Raises:
        WorldError: `world/failed` with the last lines of its standard error.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        detail = "\n".join(lines[-_LOG_LINES:])
        code = f"exit code {done.returncode}"
        raise WorldError("world/failed", module, code, "ended early", detail=detail)
    return json.loads(done.stdout.strip().splitlines()[-1])
