"""Folders of checkpoints: made beside their place, put there by a rename, the oldest removed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from phalanx.engines.checkpoint.agree import Council
from phalanx.engines.checkpoint.manifest import FILE, checkpoints_in, step_folder
from phalanx.errors import JobError
from phalanx.models.folders import sync

_SCRATCH, _REPLACED = ".partial", ".replaced"


def scratch_folder(folder: Path, name: str, step: int) -> Path:
    """Where the ranks write; beside the place of the checkpoint, on the same disk."""
    target = step_folder(folder, name, step)
    return target.with_name(f".{target.name}{_SCRATCH}")


def put(scratch: Path, folder: Path, name: str, step: int) -> None:
    """Make the scratch folder the checkpoint; one of the same step is replaced."""
    target = step_folder(folder, name, step)
    sync(scratch)
    retired = target.with_name(f".{target.name}{_REPLACED}")
    if target.exists():
        os.rename(target, retired)
    os.rename(scratch, target)
    sync(folder)
    shutil.rmtree(retired, ignore_errors=True)


def prune(folder: Path, name: str, step: int, keep: int) -> None:
    """Remove all of a kind but the newest `keep` up to this step.

    Those of later steps were left by a run that went back to an earlier one.
    """
    newest = step_folder(folder, name, step).name
    found = checkpoints_in(folder, name)
    later = [path for path in found if path.name > newest]
    for path in later + [path for path in found if path.name <= newest][keep:]:
        (path / FILE).unlink(missing_ok=True)  # half a checkpoint is none
        shutil.rmtree(path)


def recover(folder: Path) -> None:
    """Finish or remove what a run left behind that ended while it wrote."""
    for retired in folder.glob(f".*{_REPLACED}"):
        target = retired.with_name(retired.name.removeprefix(".").removesuffix(_REPLACED))
        if target.exists():
            shutil.rmtree(retired)
        else:
            os.rename(retired, target)
    for scratch in folder.glob(f".*{_SCRATCH}"):
        shutil.rmtree(scratch)


def require_space(folder: Path, needed_bytes: int, council: Council) -> None:
    """Raise `checkpoint/space` on all ranks when rank 0 sees too little room.

    What the checkpoints there hold already counts as free: they are the next to go.
    """
    free_bytes = None
    if council.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        held = sum(path.stat().st_size for path in folder.glob("*-*/*") if path.is_file())
        free_bytes = shutil.disk_usage(folder).free + held
    free_bytes = council.gather(free_bytes)[0]
    if free_bytes < needed_bytes:
        rule = (
            f"needs {needed_bytes / 1e9:.2f} GB for checkpoints, the disk has "
            f"{free_bytes / 1e9:.2f} GB for them; lower plan.keep_checkpoints or free some"
        )
        raise JobError("checkpoint/space", "checkpoint folder", folder, rule)
