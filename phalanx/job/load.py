"""The one strict loader of jobs: TOML, dotted flags, or both."""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from phalanx.errors import JobError, nearest_names, shown
from phalanx.job.sections import (
    SECTIONS,
    DataSection,
    LimitsSection,
    ModelSection,
    ObjectiveSection,
    PlanSection,
    ServeSection,
    TrainSection,
)
from phalanx.schedule_file import with_rows
from phalanx.strict import parse_toml, read_field
from phalanx.units import parse_quantity

_SCHEDULE = "plan.pipeline"
_FULL_LR = 2e-5


@dataclass(frozen=True, kw_only=True)
class Job:
    """A resolved job.

    Attributes:
        name: of the file, without its ending, or "job".
        origin: dotted key -> "file.toml:12", "flag" or "default".
    """

    name: str = "job"
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    train: TrainSection = field(default_factory=TrainSection)
    serve: ServeSection = field(default_factory=ServeSection)
    objective: ObjectiveSection = field(default_factory=ObjectiveSection)
    limits: LimitsSection = field(default_factory=LimitsSection)
    plan: PlanSection = field(default_factory=PlanSection)
    origin: Mapping[str, str] = field(default_factory=dict)

    def values(self) -> Iterator[tuple[str, Any, str]]:
        """(dotted key, value, origin) of every key, in the order of the sections."""
        for section in SECTIONS:
            record = getattr(self, section)
            for each in fields(record):
                dotted = f"{section}.{each.name}"
                yield dotted, getattr(record, each.name), self.origin.get(dotted, "default")

    def to_dict(self) -> dict[str, Any]:
        """Sections as plain tables."""
        return {section: asdict(getattr(self, section)) for section in SECTIONS}

    @property
    def result_table(self) -> dict[str, Any]:
        """The sections that change the result: every one but `[plan]`."""
        return {name: table for name, table in self.to_dict().items() if name != "plan"}

    @property
    def result_key(self) -> str:
        """Hash of `result_table`: the same for jobs of one release that have the same result."""
        table = json.dumps(self.result_table, sort_keys=True)
        return hashlib.sha256(table.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _Given:
    """A value with its origin; the text of a flag stands for what it looks like."""

    value: Any
    origin: str

    def plain(self) -> Any:
        return _plain(self.value) if self.origin == "flag" else self.value


def load_job(path: str | Path | None = None, flags: Mapping[str, Any] | None = None) -> Job:
    """Read a job file and let dotted flags override it.

    Args:
        path: TOML file (None: flags only).
        flags: dotted key -> value, as text or typed.

    Raises:
        JobError: `job/not-found`, `job/syntax`, `job/unknown-key` with the nearest keys,
            `job/bad-value`, `unit/unknown`, `job/missing` for a model that is not named.
    """
    text = _read(path)
    given: dict[str, _Given] = {}
    for dotted, value in _flatten(text, str(path)):
        given[dotted] = _Given(value, f"{Path(path or '').name}:{_line_of(text, dotted)}")
    for dotted, value in (flags or {}).items():
        _require_key(dotted, f"--{dotted}")
        given[dotted] = _Given(value, "flag")
    sections = {name: _section(name, given) for name in SECTIONS}
    origin = {dotted: each.origin for dotted, each in given.items()}
    sections["plan"] = _with_schedule(sections["plan"], origin, path)
    sections["train"] = _with_rate(sections["train"], origin)
    job = Job(name=Path(path).stem if path else "job", origin=origin, **sections)
    if not job.model.name:
        rule = "say which model: a folder, a Hub name, 'gemma3-270m', 'tiny' or 'toy'"
        raise JobError("job/missing", "model.name", None, rule)
    return job


def _with_rate(train: TrainSection, origin: Mapping[str, str]) -> TrainSection:
    """Trained weights forget what they know at a rate that adapters want."""
    if train.method != "full" or "train.lr" in origin:
        return train
    return replace(train, lr=_FULL_LR)


def _with_schedule(
    plan: PlanSection, origin: Mapping[str, str], path: str | Path | None
) -> PlanSection:
    """The schedule of a CSV file itself: a plan holds it, wherever the file goes.

    A file that a job file names lies beside it; one that a flag names, where the user is.
    """
    is_typed = any(origin[key] == "flag" for key in origin if key.startswith(_SCHEDULE))
    folder = Path(path).parent if path and not is_typed else Path()
    return replace(plan, pipeline=with_rows(plan.pipeline, folder))


def parse_flags(arguments: Sequence[str]) -> dict[str, str]:
    """`--train.lr 1e-4 --plan.mesh.tp=2` as dotted key -> text.

    Raises:
        JobError: `job/syntax` for anything that is not a dotted flag with a value,
            `job/unknown-key` for a key that no section knows.
    """
    flags: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, has_value, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in name:
            raise JobError("job/syntax", "arguments", repr(word), "expected --section.key VALUE")
        if not has_value:
            if not rest:
                raise JobError("job/syntax", word, None, "this flag needs a value")
            value = rest.pop(0)
        _require_key(name, f"--{name}")
        flags[name] = value
    return flags


def _read(path: str | Path | None) -> str:
    if path is None:
        return ""
    try:
        return Path(path).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise JobError("job/syntax", str(path), None, str(error)) from None
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        folder = Path(path).parent
        here = [str(each) for each in folder.glob("*.toml")] if os.path.isdir(folder) else []
        rule = getattr(error, "strerror", None) or str(error)
        legal = nearest_names(str(path), here)
        raise JobError("job/not-found", "job file", path, rule, legal=legal) from None


def _flatten(text: str, path: str) -> Iterator[tuple[str, Any]]:
    for section, content in parse_toml(text, path).items():
        if section not in SECTIONS:
            raise _unknown(f"{path}: [{section}]", section, SECTIONS)
        if not isinstance(content, dict):
            raise JobError("job/bad-value", section, shown(content), "must be a table of keys")
        for name, value in content.items():
            if "." in name:  # a quoted key
                raise _unknown(f"{path}: {section}.{name}", name, _fields(section))
            _require_key(f"{section}.{name}", f"{path}: {section}.{name}")
            yield f"{section}.{name}", value


def _unknown(where: str, name: str, legal: Any) -> JobError:
    return JobError("job/unknown-key", where, None, "no such key", legal=nearest_names(name, legal))


def _fields(section: str) -> dict[str, Field]:
    return {each.name: each for each in fields(SECTIONS[section])}


def _require_key(dotted: str, where: str) -> None:
    section, _, rest = dotted.partition(".")
    if section not in SECTIONS:
        raise _unknown(where, section, SECTIONS)
    name, is_inside, inner = rest.partition(".")
    known = _fields(section)
    if name not in known or (is_inside and not (inner and _is_table(known[name]))):
        everywhere = [f"{s}.{n}" for s in SECTIONS for n in _fields(s)]
        close = [f"{section}.{n}" for n in nearest_names(name, known)]
        legal = close or nearest_names(dotted, everywhere)
        raise JobError("job/unknown-key", where, None, "no such key", legal=legal)


def _is_table(each: Field) -> bool:
    return str(each.type).startswith(("Mapping", "Any"))


def _section(section: str, given: Mapping[str, _Given]) -> Any:
    values: dict[str, Any] = {}
    for name, each in _fields(section).items():
        dotted = f"{section}.{name}"
        if dotted in given:
            values[name] = _typed(section, each, given[dotted])
        inner = {k[len(dotted) + 1 :]: v for k, v in given.items() if k.startswith(f"{dotted}.")}
        if inner:
            table = _opened(values.get(name), dotted) | {k: v.plain() for k, v in inner.items()}
            values[name] = read_field(SECTIONS[section], each, table, dotted)
    return SECTIONS[section](**values)


def _opened(value: Any, dotted: str) -> dict[str, Any]:
    """A value as the table that a flag reaches into: a policy's name stands for its options."""
    if isinstance(value, list):
        rule = f"{dotted} is a list; give the whole list as a flag, or edit the file"
        raise JobError("job/bad-value", f"--{dotted}.*", None, rule)
    return {"name": value} if isinstance(value, str) and value else dict(value or {})


def _plain(value: Any) -> Any:
    """Text of a flag as the TOML value that it looks like."""
    if not isinstance(value, str):
        return value
    try:
        table = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return value
    return table["value"] if len(table) == 1 else value


def _typed(section: str, each: Field, given: _Given) -> Any:
    dotted = f"{section}.{each.name}"
    value = given.value if each.type == "str" else given.plain()
    if each.metadata["kind"] == tuple[str, ...] and isinstance(value, str):
        value = [word.strip() for word in value.split(",") if word.strip()]  # a,b,c as a flag
    if each.metadata["unit"]:
        value = parse_quantity(value, each.metadata["unit"], dotted)
    return read_field(SECTIONS[section], each, value, dotted)


def _line_of(text: str, dotted: str) -> int:
    """Line that sets a key (that of its table when it stands in a sub-table)."""
    section, name = dotted.split(".", 1)
    current, found = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("["):
            current = stripped.strip("[]").split("#")[0].strip()
            if current == dotted:
                return number
            if current == section:
                found = found or number
        head = stripped.split("=")[0].strip()
        if current == section and (head == name or head.startswith(f"{name}.")):
            return number
        if not current and head.startswith(dotted):
            return number
    return found
