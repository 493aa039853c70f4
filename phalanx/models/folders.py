"""Folders that appear whole or not at all, and disks that must have room. No torch."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phalanx.errors import JobError
from phalanx.units import format_bytes


def require_free(folder: str | Path, num_bytes: float) -> None:
    """Refuse to start what cannot be finished.

    Raises:
        JobError: `environment/disk` when fewer bytes are free where `folder` lies or will lie.
    """
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free
    if free < num_bytes:
        rule = f"needs {format_bytes(num_bytes)} of disk, and {format_bytes(free)} are free"
        raise JobError("environment/disk", "output folder", folder, rule)


@contextmanager
def atomic_folder(target: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A scratch folder beside `target`, renamed to it at the end; removed when the body raises.

    Raises:
        JobError: `job/bad-value` when `target` exists and may not be overwritten.
    """
    target = Path(target).absolute()
    _require_free(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield scratch
        for path in [*scratch.rglob("*"), scratch]:
            # scratch folders and safetensors files are private to their owner until here
            path.chmod((0o777 if path.is_dir() else 0o666) & ~_umask())
            sync(path)
        _put(scratch, target, overwrite)
        sync(target.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _require_free(target: Path, overwrite: bool) -> None:
    if target.exists() and not overwrite:
        near = next(
            path
            for number in range(2, 10_000)
            if not (path := target.with_name(f"{target.name}-{number}")).exists()
        )
        rule = "exists already and is not overwritten"
        raise JobError("job/bad-value", "output folder", target, rule, legal=[near])


def _put(scratch: Path, target: Path, overwrite: bool) -> None:
    _require_free(target, overwrite)
    if target.exists():
        retired = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
        os.rename(target, retired / "folder")
        os.rename(scratch, target)
        shutil.rmtree(retired)
    else:
        os.rename(scratch, target)


def _umask() -> int:
    mask = os.umask(0)  # can only be read by setting it
    os.umask(mask)
    return mask


def sync(path: Path) -> None:
    """Put a file, or the entries of a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
