"""Folders that appear whole or not at all. No torch."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phalanx.errors import JobError


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
            _sync(path)
        _put(scratch, target, overwrite)
        _sync(target.parent)
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


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
