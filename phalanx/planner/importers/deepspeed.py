"""DeepSpeed's own JSON, which configurations of accelerate, axolotl and TRL name by its path."""

from __future__ import annotations

import re
from pathlib import Path

from phalanx.errors import JobError
from phalanx.planner.importers.entries import (
    BAD_VALUE,
    MOST_BYTES,
    Document,
    unreadable,
    yaml_document,
)
from phalanx.planner.importers.foreign import ALL_LEFT, ASSUMED
from phalanx.planner.importers.reading import Reading

_ZERO = "zero_optimization"


def read_deepspeed(reading: Reading, key: str) -> None:
    """Stage, offload and micro-batches of the file that a key names, beside the configuration or in
    the current folder; by its name ("zero3_bf16.json"), where it is not here.

    Raises:
        JobError: `foreign/unreadable` and `foreign/value` for a file that is here.
    """
    named, where = str(reading.raw(key) or ""), reading.where(key)
    document = _document(Path(reading.document.path).parent, named)
    if document is None:
        _by_name(reading, key, named)
        return
    stage = _value(document, f"{_ZERO}.stage", 0)
    if stage not in (0, 1, 2, 3):
        place = document.place(f"{_ZERO}.stage")
        raise JobError(BAD_VALUE, place, stage, "must be 0 to 3", legal=[0, 1, 2, 3])
    _set_stage(reading, int(stage), f"{where}: {named}")
    for part, field, value in (
        ("offload_optimizer", "offload", 1.0),
        ("offload_param", "offloads_weights", True),
    ):
        if _value(document, f"{_ZERO}.{part}.device", "none") in ("cpu", "nvme"):
            reading.set(field, value, f"{where}: {named}")


def _by_name(reading: Reading, key: str, named: str) -> None:
    found = re.search(r"zero[_-]?([0-3])", named.lower())
    stage = int(found[1]) if found else 2
    how = "by its name" if found else "assumed:"
    reading.note(key, ASSUMED, f"{named or 'its file'} is not here; {how} ZeRO {stage}")
    _set_stage(reading, stage, reading.where(key))
    if "offload" in named.lower():
        reading.set("offload", 1.0, reading.where(key))


def _set_stage(reading: Reading, stage: int, where: str) -> None:
    reading.set("zero", stage, where)
    reading.set("shard", ALL_LEFT if stage else 1, where)


def _document(folder: Path, named: str) -> Document | None:
    for path in (folder / named, Path(named)) if named else ():
        if path.is_file():
            if path.stat().st_size > MOST_BYTES:
                raise unreadable(str(path), 0, f"is larger than {MOST_BYTES} bytes")
            document = yaml_document(path.read_text(encoding="utf-8", errors="replace"), str(path))
            if document is None:
                raise unreadable(str(path), 1, "must hold keys and values")
            return document
    return None


def _value(document: Document, key: str, default: int | str) -> object:
    entry = document.entries.get(key)
    return default if entry is None else entry.value
