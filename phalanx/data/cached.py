"""Results that may be computed again: written once under a hash of all that decides them.

A cache never changes a result. It lives under `~/.cache/phalanx/<kind>`; it may be deleted at any
time. Many processes may ask for the same result at once: one writes it, the others wait at a file
lock, which the system takes back from a writer that dies.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from phalanx.errors import JobError
from phalanx.models.folders import atomic_folder


def cache_folder(kind: str) -> Path:
    """`~/.cache/phalanx/<kind>` (below XDG_CACHE_HOME where that is set)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "phalanx" / kind


def content_key(*parts: Any) -> str:
    """24 hex digits that name the result of these inputs (anything JSON can write)."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def cached_file(path: Path, write: Callable[[Path], None], max_age_s: float = math.inf) -> Path:
    """`path`, written first if it is not there; others see all of it or nothing.

    Args:
        max_age_s: an older one is written anew: for what was measured and may have changed.

    Raises:
        JobError: `data/cache` when it cannot be written, and whatever `write` raises.
    """
    with _alone(path, max_age_s) as is_missing:
        if is_missing:
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=_scratch(path)) as folder:
                new = Path(folder) / path.name
                write(new)
                os.replace(new, path)
    return path


def cached_folder(path: Path, fill: Callable[[Path], None]) -> Path:
    """`path`, filled first if it is not there; others see all of it or nothing.

    Raises:
        JobError: `data/cache` when it cannot be written, and whatever `fill` raises.
    """
    with _alone(path) as is_missing:
        if is_missing:
            with atomic_folder(path) as new:
                fill(new)
    return path


def _scratch(path: Path) -> str:
    return f".{path.name}."  # as `atomic_folder` calls its own


def _is_there(path: Path, max_age_s: float) -> bool:
    try:
        return time.time() - path.stat().st_mtime <= max_age_s
    except FileNotFoundError:
        return False


@contextmanager
def _alone(path: Path, max_age_s: float = math.inf) -> Iterator[bool]:
    """Whether `path` is missing or too old, and if so with nobody else writing it.

    What writers that died left behind, of this or another result, is removed.
    """
    if _is_there(path, max_age_s):
        yield False
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent / f"{_scratch(path)}lock"):
            if _is_there(path, max_age_s):
                yield False
                return
            _sweep(path)
            yield True
    except OSError as error:
        rule = f"cannot be written: {(error.strerror or str(error)).lower()}"
        hint = "XDG_CACHE_HOME names another place"
        raise JobError("data/cache", "cache", path, f"{rule}; {hint}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that ends with this process, and leave no lock file behind."""
    while True:
        with path.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_same(lock.fileno(), path):
                continue  # whoever held it before removed the file
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _sweep(path: Path) -> None:
    """Remove scratch folders whose lock nobody holds; that of `path` is held by the caller."""
    for left in path.parent.glob(".*.*"):
        name, _, rest = left.name.removeprefix(".").rpartition(".")
        lock = left.with_name(f".{name}.lock")
        if not left.is_dir() or rest == "lock":
            continue
        if name == path.name or not lock.exists():
            shutil.rmtree(left, ignore_errors=True)
            continue
        with suppress(BlockingIOError, FileNotFoundError), lock.open("r+") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
