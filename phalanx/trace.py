"""What happened: one columnar table, the same for simulated and measured runs.

Row order within a rank is the order of issue. Constant columns (format_version, source, job) are
attributes; `to_pandas` and the exports write them out. Text columns are kept as codes into a
vocabulary, so a trace of millions of rows stays small.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from lzma import LZMAError
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np

from phalanx.errors import JobError, PlanError

FORMAT_VERSION = 1
SOURCES = ("simulated", "measured")
TEXT_COLUMNS = ("role", "action_id", "layer", "phase", "operator", "lane", "axis")
INT_COLUMNS = ("rank", "step", "item", "peer")
FLOAT_COLUMNS = ("start_s", "dur_s", "payload_bytes", "wire_bytes", "flops")
COLUMNS = (
    *("role", "rank", "step", "action_id", "item", "layer", "phase", "operator"),
    *("lane", "axis", "peer", "start_s", "dur_s", "payload_bytes", "wire_bytes", "flops"),
)
_DEFAULT: dict[str, Any] = (
    dict.fromkeys(TEXT_COLUMNS, "")
    | {"rank": 0, "step": 0, "item": -1, "peer": -1}
    | dict.fromkeys(FLOAT_COLUMNS, 0.0)
)
_DTYPE: dict[str, type] = (
    dict.fromkeys(TEXT_COLUMNS, np.int32)
    | dict.fromkeys(INT_COLUMNS, np.int64)
    | dict.fromkeys(FLOAT_COLUMNS, np.float64)
)
_HEAD = {"source": str, "job": str, "vocabulary": dict, "notes": dict}
# What zipfile, its decompressors and numpy raise for bytes that they cannot read.
_DAMAGE = (
    *(BadZipFile, zlib.error, LZMAError, struct.error, EOFError, OSError),
    *(ValueError, KeyError, RuntimeError, MemoryError),
)


@dataclass(frozen=True)
class Trace:
    """The table.

    Attributes:
        source: "simulated" or "measured".
        job: name of the job.
        columns: name -> array, all of one length; text columns hold int32 codes.
        vocabulary: text column -> its strings, indexed by code.
        notes: machine, date, versions; whatever the producer wants to keep.
    """

    source: str
    job: str
    columns: Mapping[str, np.ndarray]
    vocabulary: Mapping[str, Sequence[str]]
    notes: Mapping[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def __len__(self) -> int:
        return len(self.columns["rank"])

    @property
    def end_s(self) -> float:
        """When the last row ended (0 for an empty trace)."""
        return float((self.columns["start_s"] + self.columns["dur_s"]).max()) if len(self) else 0.0

    def column(self, name: str) -> np.ndarray:
        """A column with text decoded."""
        values = self.columns[name]
        if name in TEXT_COLUMNS:
            return np.asarray(self.vocabulary[name], dtype=object)[values]
        return values

    def rows(self) -> Iterator[dict[str, Any]]:
        """Rows as dictionaries, in table order."""
        decoded = {name: self.column(name).tolist() for name in COLUMNS}
        for values in zip(*decoded.values()):
            yield dict(zip(decoded, values))

    def select(self, mask: np.ndarray) -> Trace:
        """The rows where `mask` holds."""
        columns = {name: values[mask] for name, values in self.columns.items()}
        return Trace(self.source, self.job, columns, self.vocabulary, self.notes)

    def where(self, **equal: object) -> Trace:
        """The rows whose columns equal these values: `trace.where(rank=0, lane="compute")`."""
        mask = np.ones(len(self), dtype=bool)
        for name, value in equal.items():
            mask &= self._code_mask(name, value)
        return self.select(mask)

    def _code_mask(self, name: str, value: object) -> np.ndarray:
        if name not in TEXT_COLUMNS:
            return self.columns[name] == value
        words = list(self.vocabulary[name])
        return self.columns[name] == (words.index(str(value)) if value in words else -1)

    def log(self, rank: int, operators: Iterable[str] | None = None) -> list[tuple[str, str]]:
        """(operator, action_id) of a rank in issue order: what contract tests compare."""
        of_rank = self.where(rank=rank)
        pairs = zip(of_rank.column("operator").tolist(), of_rank.column("action_id").tolist())
        wanted = None if operators is None else set(operators)
        return [pair for pair in pairs if wanted is None or pair[0] in wanted]

    def history(self, **equal: object) -> list[tuple[float, int, str]]:
        """(start_s, rank, name) in order of time, then rank, then issue: what exact tests compare.

        A name is the action's label, or its operator where it has none.

        Args:
            equal: as in `where`.
        """
        chosen = self.where(**equal)
        names = [
            action_id or operator
            for action_id, operator in zip(chosen.column("action_id"), chosen.column("operator"))
        ]
        starts, ranks = chosen.columns["start_s"].tolist(), chosen.columns["rank"].tolist()
        order = sorted(range(len(chosen)), key=lambda at: (starts[at], ranks[at]))
        return [(starts[at], ranks[at], names[at]) for at in order]

    def to_pandas(self):
        """A DataFrame with every column of the format (needs pandas)."""
        import pandas

        frame = pandas.DataFrame({name: self.column(name) for name in COLUMNS})
        frame.insert(0, "job", self.job)
        frame.insert(0, "source", self.source)
        frame.insert(0, "format_version", self.format_version)
        return frame

    def save(self, path: str | Path) -> None:
        """Write to one compressed .npz file without pickle."""
        head = {k: getattr(self, k) for k in ("format_version", "source", "job")}
        head |= {"vocabulary": {k: list(v) for k, v in self.vocabulary.items()}}
        head |= {"notes": dict(self.notes)}
        with open(path, "wb") as file:
            np.savez_compressed(file, **{"head": np.asarray(json.dumps(head)), **self.columns})  # type: ignore[arg-type]

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Read what `save` wrote.

        Raises:
            JobError: `job/not-found` when there is no such file to read.
            PlanError: `plan/format` for another format version, `trace/file` for a file that is
                none, is damaged, or holds other columns than the format's.
        """
        try:
            content = Path(path).read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a null character in the path
            rule = f"is no file that can be read: {getattr(error, 'strerror', None) or error}"
            raise JobError("job/not-found", "trace file", repr(str(path)), rule) from error
        arrays = _read_arrays(content, str(path))
        head = _read_head(arrays.get("head"), str(path))
        columns = {name: arrays[name] for name in COLUMNS if name in arrays}
        _require_columns(columns, head["vocabulary"], str(path))
        return Trace(head["source"], head["job"], columns, head["vocabulary"], head["notes"])


def _read_arrays(content: bytes, where: str) -> dict[str, np.ndarray]:
    """The arrays of an .npz file; its checksums are compared before anything is parsed."""
    arrays = {}
    try:
        with ZipFile(BytesIO(content)) as archive:
            for name in archive.namelist():
                array = np.lib.format.read_array(BytesIO(archive.read(name)), allow_pickle=False)
                arrays[name.removesuffix(".npy")] = array
    except _DAMAGE as error:
        rule = "is no trace, or a damaged one"
        raise PlanError("trace/file", where, None, rule, detail=str(error)) from error
    return arrays


def _read_head(array: np.ndarray | None, where: str) -> dict[str, Any]:
    try:
        head = None if array is None else json.loads(str(array))
    except (ValueError, RecursionError):
        head = None
    if not isinstance(head, dict):
        raise PlanError("trace/file", f"{where}: head", None, "is not the head of a trace")
    version = head.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        rule = "this version of Phalanx reads another trace format"
        shown = version if isinstance(version, int) else repr(version)
        raise PlanError("plan/format", where, shown, rule, legal=[FORMAT_VERSION])
    for name, kind in _HEAD.items():
        if not isinstance(head.get(name), kind):
            rule = f"the head of a trace needs a {kind.__name__} here"
            raise PlanError("trace/file", f"{where}: {name}", repr(head.get(name)), rule)
    if head["source"] not in SOURCES:
        rule = "no such source"
        raise PlanError("trace/file", f"{where}: source", repr(head["source"]), rule, legal=SOURCES)
    return head


def _require_columns(
    columns: Mapping[str, np.ndarray], vocabulary: Mapping[str, Any], where: str
) -> None:
    """All columns, of the format's types and one length; each code has its word."""
    missing = [name for name in COLUMNS if name not in columns]
    if missing:
        raise PlanError("trace/file", f"{where}: {missing[0]}", None, "this column is missing")
    shape = (columns["rank"].size,)
    for name in COLUMNS:
        column, dtype = columns[name], _DTYPE[name]
        if column.dtype != dtype or column.shape != shape:
            found, rule = f"{column.dtype}{list(column.shape)}", "a column of another form"
            legal = [f"{np.dtype(dtype)}{list(shape)}"]
            raise PlanError("trace/file", f"{where}: {name}", found, rule, legal=legal)
    for name in TEXT_COLUMNS:
        words, codes = vocabulary.get(name), columns[name]
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            rule = "a text column needs the list of its words"
            raise PlanError("trace/file", f"{where}: vocabulary.{name}", None, rule)
        if len(codes) and not 0 <= codes.min() <= codes.max() < len(words):
            rule = f"has codes outside its {len(words)} words"
            raise PlanError("trace/file", f"{where}: {name}", None, rule)


class TraceBuilder:
    """Collects rows one at a time; cheap enough for the step path (one tuple per row)."""

    def __init__(self, source: str, job: str = "") -> None:
        assert source in SOURCES, source
        self.source, self.job = source, job
        self.notes: dict[str, Any] = {}
        self._rows: list[tuple] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, **values: Any) -> None:
        """Append a row; columns that are not given hold their empty value."""
        self._rows.append(tuple(values.get(name, _DEFAULT[name]) for name in COLUMNS))

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows given as dictionaries, such as those of another rank."""
        for row in rows:
            self.add(**row)

    def build(self) -> Trace:
        """The table so far."""
        by_column = list(zip(*self._rows)) if self._rows else [()] * len(COLUMNS)
        columns: dict[str, np.ndarray] = {}
        vocabulary: dict[str, list[str]] = {}
        for name, values in zip(COLUMNS, by_column):
            if name in TEXT_COLUMNS:
                index: dict[str, int] = {}
                values = tuple(index.setdefault(value, len(index)) for value in values)
                vocabulary[name] = list(index)
            columns[name] = np.asarray(values, dtype=_DTYPE[name])
        return Trace(self.source, self.job, columns, vocabulary, dict(self.notes))


def merge(traces: Sequence[Trace]) -> Trace:
    """One table from the traces of several ranks or roles, in their order."""
    builder = TraceBuilder(traces[0].source, traces[0].job)
    for trace in traces:
        builder.extend(trace.rows())
        builder.notes.update(trace.notes)
    return builder.build()
