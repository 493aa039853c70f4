"""Published training measurements as plans that the cost models can price.

Minimum inputs of a row: an accelerator, the number of devices, the precision, the sequence length,
the sizes of the model (or a known name), degrees of parallelism that determine the rest, and the
batch (`row_plan` says what a framework implies). A row that lacks one is reported as insufficient
input, with what it lacks; it is not guessed at.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.cost.model_shape import ModelShape
from phalanx.cost.training_plans import COLUMNS, TrainingPlans
from phalanx.hardware import Machine
from phalanx.lab.csv_rows import CsvRow, read_rows
from phalanx.lab.row_class import TRAINING_CLASSES, is_grid, training_class
from phalanx.lab.row_machine import machine_of_row
from phalanx.lab.row_measured import has_failed, memory_bytes, step_s
from phalanx.lab.row_plan import plan_of_row
from phalanx.lab.row_recompute import recomputing
from phalanx.lab.row_shape import SHAPE_NUMBERS, shape_of_row
from phalanx.lab.row_software import precision_of, software_of

REQUIRED = ("source_id", "model", "hardware", "n_devices", "dtype", "seq_len_tokens")
NUMBERS = (
    *SHAPE_NUMBERS,
    *("n_devices", "devices_per_node", "tp", "pp", "vpp", "dp", "cp", "ep"),
    *("micro_batch_seqs", "global_batch_seqs", "seq_len_tokens"),
    *("tokens_per_s_per_device", "step_time_s", "tflops_per_device", "memory_gb"),
)
__all__ = ["TRAINING_CLASSES", "Batch", "TrainingRow", "batches", "read_training"]


@dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """One measurement.

    Attributes:
        line: in the table.
        source_id, model, hardware: as the table names them.
        row_class: one of `TRAINING_CLASSES`.
        machine: None where the accelerator is not known.
        shape, plans: None where inputs are missing; `plans` is a table of one.
        devices, precision, software: what is known of them in any case (0 or "" if not).
        measured_step_s, measured_memory_bytes: None where nothing was printed.
        failed: the run crashed or ran out of memory.
        is_trusted: the values were read from their source, not recalled from memory.
        group: key of whole groups: what a fit may not see parts of.
        grid: key of rows that differ in their plan alone.
        missing: names of absent minimum inputs.
    """

    line: int
    source_id: str
    row_class: str
    model: str
    hardware: str
    machine: Machine | None
    shape: ModelShape | None
    plans: TrainingPlans | None
    devices: int
    precision: str
    software: str
    measured_step_s: float | None
    measured_memory_bytes: float | None
    failed: bool
    is_trusted: bool
    group: str
    grid: str
    missing: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        """Whether it has the minimum inputs."""
        return not self.missing

    @property
    def is_fitted(self) -> bool:
        """Whether fits may use it."""
        return self.is_complete and self.machine is not None and self.is_trusted

    @property
    def tokens_per_step(self) -> float:
        """Over all devices; 0 where the plan is not known."""
        return float(self.plans.step_tokens) if self.plans is not None else 0.0


@dataclass(frozen=True)
class Batch:
    """Rows that one call of a cost model prices: the same model, machine and kind of training."""

    rows: tuple[TrainingRow, ...]
    shape: ModelShape
    machine: Machine
    plans: TrainingPlans


def read_training(path: str | Path) -> list[TrainingRow]:
    """All rows of a table in the columns of training_throughput.csv, in its order.

    Raises:
        JobError: `job/not-found`, `system/published`; see `csv_rows.read_rows`.
    """
    rows = read_rows(path, required=REQUIRED, numbers=NUMBERS)
    made = [_training_row(row) for row in rows]
    return _with_grids(made)


def batches(rows: Sequence[TrainingRow]) -> list[Batch]:
    """Rows with machine and plan, joined where one call can price them; order is kept inside."""
    joined: dict[tuple, list[TrainingRow]] = defaultdict(list)
    for row in rows:
        if row.machine is not None and row.shape is not None and row.plans is not None:
            joined[row.shape, row.machine, *_scalars(row.plans)].append(row)
    return [_batch(each) for each in joined.values()]


def _batch(rows: Sequence[TrainingRow]) -> Batch:
    first = rows[0]
    assert first.shape is not None and first.machine is not None and first.plans is not None
    columns: dict[str, Any] = {
        name: np.array([getattr(row.plans, name).item() for row in rows]) for name in COLUMNS
    }
    return Batch(tuple(rows), first.shape, first.machine, replace(first.plans, **columns))


def _scalars(plans: TrainingPlans) -> tuple:
    return tuple(getattr(plans, field.name) for field in fields(plans) if field.name not in COLUMNS)


def _with_grids(rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    plans: dict[str, set] = defaultdict(set)
    for row in rows:
        if row.plans is not None:
            plans[row.grid].add(tuple(getattr(row.plans, name).item() for name in COLUMNS))
    return [
        replace(row, row_class="grid")
        if is_grid(row.row_class, row.source_id, plans, row.grid)
        else row
        for row in rows
    ]


def _training_row(row: CsvRow) -> TrainingRow:
    shape, lacks = shape_of_row(row)
    machine = machine_of_row(row)
    plans, missing = plan_of_row(row, shape)
    if plans is not None and shape is not None and machine is not None:
        plans = recomputing(row, shape, plans, machine)
    if not row.get("hardware") or re.search(r" \+ ", row.get("hardware")):
        missing.append("hardware of one kind")
    if row.words("workload").startswith("rl"):
        missing.append("the plan and lengths of generation, which no column holds")
    if lacks:
        missing.insert(0, lacks)
    missing += row.unread
    complete = not missing
    return TrainingRow(
        line=row.line,
        source_id=row.get("source_id"),
        row_class=training_class(row, shape),
        model=row.get("model"),
        hardware=row.get("hardware"),
        machine=machine,
        shape=shape if complete else None,
        plans=plans if complete else None,
        devices=row.count("n_devices") or 0,
        precision=precision_of(row),
        software=software_of(row),
        measured_step_s=step_s(row, shape, plans),
        measured_memory_bytes=memory_bytes(row),
        failed=has_failed(row),
        is_trusted=not row.is_from_memory,
        group=_key(row, "source_id", "model", "hardware", "n_devices", "seq_len_tokens", *_SHAPE),
        grid=_key(row, "source_id", "model", "hardware", "n_devices", "seq_len_tokens", *_SHAPE)
        + f"|{row.get('global_batch_seqs')}|{precision_of(row)}",
        missing=tuple(missing),
    )


_SHAPE = ("layers", "hidden")


def _key(row: CsvRow, *columns: str) -> str:
    return "|".join(row.get(name) for name in columns)
