"""Published serving measurements as rows that can be predicted.

The documented minimum inputs of a row: a model (a known name, or its sizes in the columns that
training tables have for them) and an accelerator, how the engine cuts the model (for separate
prompt and answer engines, how many of each), the lengths of prompts and answers, and how much is
asked of it: a concurrency, a static batch, a load without end, or a number of requests at a rate.
`ServingRow.missing` names those that a row lacks.

Why separate engines need their numbers: taking one of each for the rows that do not say misses the
median time between tokens by 55 %, against 8 % where the numbers are given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from phalanx.cost.model_shape import ModelShape
from phalanx.hardware import Machine, machine_called
from phalanx.lab.csv_rows import CsvRow, read_rows
from phalanx.lab.row_shape import SHAPE_NUMBERS, shape_of_row
from phalanx.lab.serving_degrees import Degrees, aggregated_degrees, split_degrees
from phalanx.lab.serving_names import load_of, precision_of, software_of
from phalanx.models.known import known_shape

METRICS = ("ttft_s", "tpot_s", "latency_s", "output_tokens_per_s_per_device")
KINDS = ("closed", "static", "saturated", "split", "open")
REQUIRED = ("source_id", "model", "hardware", "input_len_tokens", "output_len_tokens")
NUMBERS = (
    "n_devices",
    "tp",
    "pp",
    "ep",
    "attention_dp",
    *(f"{role}_{name}" for role in ("prefill", "decode")
      for name in ("workers", "tp", "attention_dp", "moe_ep")),
    "input_len_tokens",
    "output_len_tokens",
    "batch_size",
    "concurrency",
    "request_rate_qps",
    "requests_per_s",
    "output_tokens_per_s",
    "output_tokens_per_s_per_device",
    "ttft_ms",
    "tpot_ms",
    "e2e_latency_ms",
    *SHAPE_NUMBERS,
)  # fmt: skip
LOAD_INPUTS = "concurrency, batch_size, a saturated load, or a rate and a number of requests"
_CONTRADICTION = 0.1  # of a latency and the sum of its parts


@dataclass(frozen=True, kw_only=True)
class ServingRow:
    """One measurement.

    Attributes:
        line: in the table.
        group: rows of one sweep, which a fit must not see in part.
        rank_group: rows whose order is judged: plans of one model on one accelerator at one load.
        kind: of load, one of `KINDS`.
        degrees: of the engine; of a split deployment, of its answer engines.
        prompt_degrees: of its prompt engines; None where one engine does both.
        precision, software, load: keys of the efficiency tables.
        concurrency: requests in flight, or rows of a static batch (0: as many as fit); where
            requests arrive at a rate, the most that run.
        requests_per_s, num_requests: of a trace that arrives at a rate.
        measured: by metric, those that are given or follow from given ones.
        missing: minimum inputs that the row lacks.
        is_trusted: the values were read from their source, not recalled from memory.
    """

    line: int
    source_id: str
    model: str
    hardware: str
    group: str
    rank_group: str
    kind: str
    shape: ModelShape | None
    machine: Machine | None
    degrees: Degrees
    prompt_degrees: Degrees | None
    precision: str
    software: str
    load: str
    prompt_tokens: float
    answer_tokens: float
    concurrency: float
    requests_per_s: float
    num_requests: float
    measured: Mapping[str, float]
    missing: tuple[str, ...]
    is_trusted: bool
    row_class: str = "serving"

    @property
    def unknown(self) -> str:
        """What a complete row names that Phalanx does not know; such rows count as not covered."""
        if self.shape is None:
            return f"model: {self.model}"
        return f"accelerator: {self.hardware}" if self.machine is None else ""

    @property
    def is_predictable(self) -> bool:
        """Whether nothing is missing or unknown."""
        return not (self.missing or self.unknown)

    @property
    def is_fitted(self) -> bool:
        """Usable for fits: predictable, with a measurement that is no recollection."""
        return self.is_predictable and self.is_trusted and bool(self.measured)

    @property
    def devices(self) -> int:
        """All of them."""
        return self.degrees.devices + (self.prompt_degrees.devices if self.prompt_degrees else 0)


def read_serving(path: str | Path) -> list[ServingRow]:
    """All rows of a table in the columns of `serving_throughput.csv`, in its order.

    Raises:
        JobError: `job/not-found`, `system/published` for a file that is no such table.
    """
    return [_row(row) for row in read_rows(path, required=REQUIRED, numbers=NUMBERS)]


def _row(row: CsvRow) -> ServingRow:
    shape, machine = _shape(row), _machine(row.get("hardware"))
    is_split = row.words("mode") == "disaggregated"
    both = split_degrees(row) if is_split else None
    degrees = both[1] if both else aggregated_degrees(row)
    kind, concurrency = _load(row, is_split)
    precision = precision_of(row)
    prompt, answer = (_at_least_one(row, f"{end}put_len_tokens") for end in ("in", "out"))
    given = {
        "model": bool(row.get("model")),
        "hardware of one kind": _is_one_kind(row.get("hardware")),
        "workers of each kind" if is_split else "tp": (both if is_split else degrees) is not None,
        "input_len_tokens": bool(prompt),
        "output_len_tokens": bool(answer),
        LOAD_INPUTS: bool(kind),
        "dtype": bool(precision),
        "tokens accepted per step": not _is_speculative(row),
    }
    missing = (*(name for name, is_given in given.items() if not is_given), *row.unread)
    degrees = degrees or Degrees()
    measured = _measured(row, answer)
    size = f"{degrees.devices}+{both[0].devices}" if both else str(degrees.devices)
    lengths = f"{prompt:g}+{answer:g}"
    names = (row.get("source_id"), row.get("model"), row.get("hardware"))
    return ServingRow(
        line=row.line,
        source_id=names[0],
        model=names[1],
        hardware=names[2],
        group="|".join((*names, size, lengths)),
        rank_group="|".join((*names, lengths, f"{concurrency:g}", row.get("engine"))),
        kind=kind or "closed",
        shape=shape,
        machine=machine,
        degrees=degrees,
        prompt_degrees=both[0] if both else None,
        precision=precision,
        software=software_of(row),
        load=load_of(row, kind),
        prompt_tokens=prompt,
        answer_tokens=answer,
        concurrency=concurrency,
        requests_per_s=row.number("request_rate_qps") or 0.0,
        num_requests=_named(row.words("scenario"), r"(\d+) requests,"),
        measured=measured,
        missing=missing,
        is_trusted=not row.is_from_memory,
    )


def _load(row: CsvRow, is_split: bool) -> tuple[str, float]:
    """Kind of load and requests in flight; no kind where the row does not say."""
    scenario = row.words("scenario")
    concurrency = _at_least_one(row, "concurrency")
    if "saturated" in scenario:
        return "saturated", concurrency
    batch = _at_least_one(row, "batch_size")
    is_closed = "closed-loop" in row.words("latency_statistic") and not concurrency
    if is_closed and batch and not is_split:
        return "closed", batch * (row.count("attention_dp") or 1)
    is_alone = "batch" in scenario or "real time" in scenario or not concurrency
    if is_alone and batch and not is_split:
        return "static", batch
    if concurrency:
        return ("split" if is_split else "closed"), concurrency
    if row.number("request_rate_qps") and _named(scenario, r"(\d+) requests,") and not is_split:
        return "open", _named(row.words("notes"), r"max_num_seqs (\d+)")
    return "", 0.0


def _at_least_one(row: CsvRow, column: str) -> float:
    """A number of things; 0 where there is none, or less than one."""
    value = row.number(column) or 0.0
    return value if value >= 1.0 else 0.0


def _named(text: str, pattern: str) -> float:
    """A number that a text names; 0 where it does not."""
    found = re.search(pattern, text)
    return float(found[1]) if found else 0.0


def _is_one_kind(hardware: str) -> bool:
    """Whether a text names one accelerator, not several kinds or a family of them."""
    return bool(hardware) and not re.search(r"not stated|\(x\d+\).*\(x\d+\)", hardware.lower())


def _is_speculative(row: CsvRow) -> bool:
    """Whether tokens are drafted; how many of them are accepted is no column of the table."""
    text = f"{row.words('scenario')} {row.words('notes')}"
    return bool(re.search(r"suffix decoding|draft acceptance|multi-token prediction on", text))


def _measured(row: CsvRow, answer: float) -> dict[str, float]:
    """What is given, in seconds; a latency follows from TTFT + (answer - 1) TPOT.

    A given latency that contradicts that sum is of answers that ended before their stated length
    (a fifth of the static profiles): it is of no known number of tokens and left out.
    """
    columns = {"ttft_s": "ttft_ms", "tpot_s": "tpot_ms", "latency_s": "e2e_latency_ms"}
    found = {name: value / 1e3 for name, column in columns.items() if (value := row.number(column))}
    if "ttft_s" in found and "tpot_s" in found and answer:
        follows = found["ttft_s"] + (answer - 1.0) * found["tpot_s"]
        given = found.setdefault("latency_s", follows)
        if abs(given / follows - 1.0) > _CONTRADICTION:
            del found["latency_s"]
    if rate := row.number("output_tokens_per_s_per_device"):
        found["output_tokens_per_s_per_device"] = rate
    return found


def _shape(row: CsvRow) -> ModelShape | None:
    """Of a known name, else of the sizes that the row prints; None where it prints too few."""
    return _known(row.get("model")) or shape_of_row(row)[0]


@cache
def _known(model: str) -> ModelShape | None:
    return known_shape(model)


@cache
def _machine(hardware: str) -> Machine | None:
    return machine_called(hardware)
