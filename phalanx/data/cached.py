"""Results that may be computed again: written once under a hash of all that decides them.

A cache never changes a result. It lives under `~/.cache/phalanx/<kind>`; it may be deleted at any
time.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
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


def cached_file(path: Path, write: Callable[[Path], None]) -> Path:
    """`path`, written first if it is not there; others see all of it or nothing."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as folder:
            new = Path(folder) / path.name
            write(new)
            os.replace(new, path)
    return path


def cached_folder(path: Path, fill: Callable[[Path], None]) -> Path:
    """`path`, filled first if it is not there; of several processes one wins."""
    if not path.exists():
        try:
            with atomic_folder(path) as new:
                fill(new)
        except JobError:
            if not path.exists():
                raise
    return path
