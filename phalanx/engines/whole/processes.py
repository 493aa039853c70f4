"""Starting the processes of a run, and reading what they say. No torch in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import WorldError

LOG_LINES = 12  # of a failed process, shown in its error


def launch_training(
    folder: Path, num_ranks: int, threads: int, on_event: Callable[[Mapping[str, Any]], None]
) -> None:
    """Run `phalanx.engines.train` on `num_ranks` local processes, under torchrun.

    Args:
        folder: run folder with job.json and plan.json; gets train.log.
        num_ranks: processes.
        threads: OMP threads of each.
        on_event: called with each event of rank 0.

    Raises:
        WorldError: `world/failed` with the last lines of the log.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(num_ranks), "-m", "phalanx.engines.train", str(folder)),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    log = folder / "train.log"
    with open(log, "w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                _tell(line, on_event, errors)
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait(30)
            raise
    if code:
        raise _failed("training", code, log.read_text(encoding="utf-8"))


def _tell(line: str, on_event: Callable[[Mapping[str, Any]], None], log: Any) -> None:
    """An event, or a line that some library printed."""
    if line.startswith("{"):
        on_event(json.loads(line))
    else:
        log.write(line)


def run_module(module: str, arguments: Sequence[str], given: str = "") -> Any:
    """Run `python -m module arguments` and read its last line of output as JSON.

    Raises:
        WorldError: `world/failed` with the last lines of its standard error.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    if done.returncode:
        raise _failed(module, done.returncode, done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


def _failed(what: str, code: int, log: str) -> WorldError:
    lines = [line for line in log.splitlines() if line.strip()]
    own = [line for line in lines if line.split(":")[0].count("/") == 1 and " " not in line[:12]]
    detail = "\n".join(own[:1] or lines[-LOG_LINES:])
    return WorldError("world/failed", what, f"exit code {code}", "ended early", detail=detail)
