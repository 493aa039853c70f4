"""What the keys of a job mean, for help pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from phalanx.errors import JobError, nearest_names
from phalanx.job.sections import SECTIONS


@dataclass(frozen=True)
class KeyMeaning:
    """One key.

    Attributes:
        section, section_meaning: where it stands, and what the section is about.
        key: dotted.
        default: as one would write it.
        meaning: one line, with the legal words and the range.
    """

    section: str
    section_meaning: str
    key: str
    default: str
    meaning: str


def describe_keys(which: str = "") -> list[KeyMeaning]:
    """All keys, those of a section ("train"), or one key ("train.lr").

    Raises:
        JobError: `job/unknown-key` with the nearest names.
    """
    found = [
        KeyMeaning(name, (cls.__doc__ or "").rstrip("."), f"{name}.{each.name}", *_told(each))
        for name, cls in SECTIONS.items()
        for each in fields(cls)
    ]
    chosen = [each for each in found if not which or which in (each.section, each.key)]
    if not chosen:
        everything = [*SECTIONS, *(each.key for each in found)]
        legal = nearest_names(which, everything) or list(SECTIONS)
        raise JobError("job/unknown-key", "key", which, "no such section or key", legal=legal)
    return chosen


def _told(each: Field) -> tuple[str, str]:
    default = each.default if each.default_factory is MISSING else each.default_factory()
    meaning = str(each.metadata["doc"])
    if each.metadata["choices"]:
        meaning += f" ({' | '.join(each.metadata['choices'])})"
    if limits := _limits(each.metadata):
        meaning += f" ({limits})"
    return _text(default), meaning


def _limits(metadata: Mapping[str, Any]) -> str:
    low, high = metadata["low"], metadata["high"]
    if high is not None:
        return f"{low:g} to {high:g}"
    return f"at least {low:g}" if low else ""


def _text(value: Any) -> str:
    if value in ("", (), {}):
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
