"""GGUF files as model folders: dequantised once, kept under the hash of their content."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

from phalanx.data.cached import cache_folder, cached_folder
from phalanx.errors import JobError

_FORMAT_VERSION = 1  # of what is made of a file
_HASHED_AT_ONCE = 16 * 2**20


def gguf_folder(path: str | Path, log: Callable[[str], None] = print) -> Path:
    """The model folder of a GGUF file; the first call writes it, others wait for it.

    Raises:
        JobError: `environment/missing` without the gguf package, `environment/disk` without room,
            and as `gguf_import.GgufModel`.
    """
    path = Path(path)
    if importlib.util.find_spec("gguf") is None:
        rule = "needs the package gguf; run: pip install 'phalanx-parallel[hf]'"
        raise JobError("environment/missing", "model.name", path, rule)
    target = cache_folder("models") / f"gguf-{_FORMAT_VERSION}-{_content_hash(path)}"

    def fill(folder: Path) -> None:
        from phalanx.models.gguf_import import GgufModel
        from phalanx.models.hf import fill_folder

        log(f"Dequantising {path.name} once to {target}")
        model = GgufModel(path)
        model.save_tokenizer(folder)
        fill_folder(folder, model.config, model.tensors())

    return cached_folder(target, fill)


def _content_hash(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_HASHED_AT_ONCE):
                digest.update(chunk)
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
        raise JobError("job/not-found", "model.name", path, rule) from error
    return digest.hexdigest()[:24]
