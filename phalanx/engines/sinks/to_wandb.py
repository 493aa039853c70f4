"""Numbers to Weights & Biases.

Its own settings count: WANDB_PROJECT (else "phalanx"), WANDB_ENTITY, WANDB_MODE=offline, the key of
`wandb login`. Nothing is asked on the terminal and nothing is taken from it.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

_ID_FILE = "wandb-run"


class Writer:
    """One run, which a resumed training goes on with."""

    def __init__(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        id_path = folder / _ID_FILE
        if not id_path.is_file():
            id_path.write_text(uuid.uuid4().hex[:12])
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "phalanx"),
            name=run_name,
            id=id_path.read_text().strip(),
            resume="allow",
            dir=str(folder),
            config=dict(config),
            settings=wandb.Settings(
                console="off", silent=True, init_timeout=15, login_timeout=1, finish_timeout=15
            ),
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One row; numbers of an evaluation join those of its step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()
