"""Numbers to Trackio, which keeps them on this machine unless its own settings say otherwise.

TRACKIO_PROJECT (else "phalanx"), TRACKIO_DIR and TRACKIO_SPACE_ID are Trackio's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trackio


def _print_aside(*args: Any, **options: Any) -> None:
    print(*args, **options | {"file": sys.stderr})


for _name, _module in list(sys.modules.items()):
    if _name.partition(".")[0] == "trackio":  # stdout carries the events of the run
        _module.print = _print_aside


class Writer:
    """One run, which a resumed training goes on with."""

    def __init__(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "phalanx"),
            name=f"{run_name}-{folder.resolve().name}",
            config=dict(config),
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One row."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()
