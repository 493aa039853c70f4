"""Schedules as CSV files, in the text form that torch's pipelining runtime reads and writes.

A row per pipeline rank, a cell per pass: stage, kind (F forward, B backward, I input gradient, W
weight gradient), micro-batch. Cells may be empty (a rank that idles in a drawing), and torch's
`(0F3;7B0)OVERLAP_F_B` stands for its parts one after the other.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from phalanx.check_order import check_order
from phalanx.errors import JobError, shown
from phalanx.policy import Step

Lists = list[list[Step]]

_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_TRANSFER = re.compile(r"[0-9]+(SEND|RECV)_[FB][0-9]+|[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD)")
_LARGEST_BYTES = 64 << 20


def write_schedule(path: str | Path, lists: Sequence[Sequence[Step]]) -> None:
    """Write lists as a CSV file.

    Raises:
        JobError: `cli/file` when it cannot be written.
    """
    try:
        Path(path).write_text("".join(f"{row}\n" for row in as_rows(lists)), encoding="utf-8")
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        raise JobError("cli/file", "schedule", path, rule) from error


def as_rows(lists: Sequence[Sequence[Step]]) -> tuple[str, ...]:
    """Lists as the rows of a file, and of the policy `pipeline/listed`."""
    return tuple(",".join(map(str, steps)) for steps in lists)


def read_schedule(path: str | Path) -> Lists:
    """The lists in a file, complete and able to run.

    Raises:
        JobError: `job/not-found` for a file that cannot be read, `order/illegal` for a cell that is
            no pass.
        CheckError: `order/missing`, `order/doubled`, `order/illegal` or `check/deadlock` with row,
            column and cell, and the grid.
    """
    try:
        too_large = Path(path).stat().st_size > _LARGEST_BYTES
        content = "" if too_large else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise JobError("job/not-found", "schedule", path, rule) from error
    if too_large:
        rule = f"is larger than {_LARGEST_BYTES >> 20} MiB, which no schedule is"
        raise JobError("order/illegal", "schedule", path, rule)
    return parse_schedule(content, str(path))


def parse_schedule(content: str, where: str) -> Lists:
    """The lists in the text of a file; `where` names it in errors, which are `read_schedule`'s."""
    lists: Lists = []
    columns: list[list[int]] = []
    for row, cells in enumerate(_cells(content, where)):
        steps, places = [], []
        for column, cell in enumerate(cells):
            for text in _parts(cell):
                steps.append(_step(text, f"{where}, row {row + 1}, column {column + 1}"))
                places.append(column + 1)
        lists.append(steps)
        columns.append(places)
    while lists and not lists[-1]:  # a file may end with empty lines
        lists.pop()
    _require_passes(lists, where)

    def place(rank: int, slot: int) -> str:
        row = columns[rank]
        column = row[slot] if slot < len(row) else row[-1] + 1
        return f"{where}, row {rank + 1}, column {column}"

    holders = _holders(lists, where)
    num_items = max(step.item for steps in lists for step in steps) + 1
    check_order(lists, len(holders), num_items, holders, place)
    return lists


def with_rows(options: str | Mapping[str, Any], folder: str | Path = ".") -> Any:
    """Options of a pipeline policy in which `file` of the policy `listed` has become its `rows`.

    Args:
        options: a name, or a table with `name` and options.
        folder: that a relative file is looked for in.

    Raises:
        PhalanxError: as `read_schedule`; `job/unknown-key` for a file and rows at once,
            `job/missing` for neither.
    """
    name = options.get("name") if isinstance(options, Mapping) else options
    if name == "listed" and (isinstance(options, str) or not {"file", "rows"} & set(options)):
        rule = 'a listed schedule needs a file (file = "order.csv"), or its rows'
        raise JobError("job/missing", "plan.pipeline.file", None, rule)
    if not isinstance(options, Mapping) or "file" not in options or name != "listed":
        return options
    if "rows" in options:
        rule = "rows are given already"
        raise JobError("job/unknown-key", "plan.pipeline.file", options["file"], rule)
    if not isinstance(options["file"], str):
        rule = "must be text"
        raise JobError("job/bad-value", "plan.pipeline.file", shown(options["file"]), rule)
    lists = read_schedule(Path(folder) / options["file"])
    rest = {name: value for name, value in options.items() if name != "file"}
    return rest | {"rows": list(as_rows(lists))}


def _cells(content: str, where: str) -> Iterator[list[str]]:
    try:
        yield from csv.reader(StringIO(content.removeprefix("\ufeff")), strict=True)
    except csv.Error as error:
        raise JobError("order/illegal", where, None, f"is no CSV: {error}") from error


def _parts(cell: str) -> list[str]:
    cell = cell.strip()
    overlap = _OVERLAP.fullmatch(cell)
    parts = overlap[1].split(";") if overlap else [cell]
    return [part.strip() for part in parts if part.strip()]


def _step(text: str, place: str) -> Step:
    step = Step.parse(text)
    if step is None:
        rule = "is no pass: stage, one of F B I W, micro-batch, as in 2F0"
        if _TRANSFER.fullmatch(text):
            rule = "is a transfer, and those are derived; save the schedule as compute_only"
        raise JobError("order/illegal", place, shown(text), rule)
    return step


def _require_passes(lists: Lists, where: str) -> None:
    if not lists:
        raise JobError("order/missing", where, None, "holds no pass")
    for row, steps in enumerate(lists):
        if not steps:
            rule = "every rank has a row, and every row a pass"
            raise JobError("order/missing", f"{where}, row {row + 1}", None, rule)


def _holders(lists: Lists, where: str) -> list[int]:
    """The rank of each stage: that of its first cell."""
    holder: dict[int, int] = {}
    for rank, steps in enumerate(lists):
        for step in steps:
            holder.setdefault(step.stage, rank)
    missing = next((stage for stage in range(max(holder)) if stage not in holder), None)
    if missing is not None:
        rule = f"no row has stage {missing}"
        raise JobError("order/missing", where, None, rule, legal=[str(Step(missing, "F", 0))])
    return [holder[stage] for stage in sorted(holder)]
