"""Scalars as TensorBoard's event files, in `tensorboard/` below the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class Writer:
    """One event file; a resumed run adds another, which TensorBoard shows as the same run."""

    def __init__(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        self._writer = SummaryWriter(str(folder / "tensorboard"))
        rows = "\n".join(f"| {name} | {value} |" for name, value in config.items())
        self._writer.add_text(f"job {run_name}", f"| key | value |\n|---|---|\n{rows}", 0)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """A point per name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush."""
        self._writer.close()
