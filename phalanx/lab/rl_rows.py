"""Rows of whole steps of reinforcement learning: generation, log-probabilities, training, weights.

There are no columns for generation, so it is read from the notes: "On policy" or "1-step Off",
"generation TP 16 PP 1", "generation batch 512", "average sequence length 5698 tokens". What they
do not say is assumed, the same for all rows: prompts of at most `PROMPT_TOKENS`; two forward passes
before training; of a run that is so many steps off policy, half of the devices generate; the newest
vLLM generates and the newest Megatron trains, with whole layers recomputed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.cost.answer_lengths import AnswerLengths
from phalanx.cost.model_shape import ModelShape
from phalanx.cost.rl_efficiency import RlEfficiency, rl_efficiency
from phalanx.cost.rl_step import RlStep, RlWork, rl_steps, rollout
from phalanx.cost.serving_efficiency import serving_efficiency
from phalanx.cost.serving_plans import serving_plans
from phalanx.cost.training_plans import RECOMPUTE, TrainingPlans
from phalanx.cost.training_step import training_step
from phalanx.hardware import Machine
from phalanx.lab.csv_rows import CsvRow, read_rows
from phalanx.lab.row_machine import machine_of_row
from phalanx.lab.row_shape import shape_of_row
from phalanx.lab.row_software import precision_of
from phalanx.lab.training_rows import NUMBERS, REQUIRED

PROMPT_TOKENS = 150.0  # assumption: a question of a few sentences with its template
_WEIGHT_BYTES = 2
_NOTES = {
    "serving_tensor": r"generation tp ([1-9]\d*)",
    "num_answers": r"generation batch ([1-9]\d*)",
    "mean_tokens": r"average sequence length ([1-9]\d*)",
}


@dataclass(frozen=True, kw_only=True)
class RlRow:
    """A row and what it takes to price it.

    Attributes:
        line: in the table.
        group: key of whole groups.
        serving_tensor: of an engine.
        devices: that train, and that generate; the same where `is_colocated`.
        plans: one update.
        missing: names of absent inputs; the rest is meaningless then.
    """

    line: int
    source_id: str
    model: str
    group: str
    measured_step_s: float
    machine: Machine | None = None
    shape: ModelShape | None = None
    plans: TrainingPlans | None = None
    work: RlWork | None = None
    precision: str = "bf16"
    serving_tensor: int = 1
    devices: int = 0
    is_colocated: bool = True
    missing: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether it can be priced."""
        return not self.missing


def read_rl(path: str | Path) -> list[RlRow]:
    """The rows of a training table whose workload starts with "rl".

    Raises:
        JobError: from `csv_rows.read_rows`.
    """
    rows = read_rows(path, required=REQUIRED, numbers=NUMBERS)
    return [_rl_row(row) for row in rows if row.words("workload").startswith("rl")]


def _rl_row(row: CsvRow) -> RlRow:
    shape, lacks = shape_of_row(row)
    machine = machine_of_row(row)
    found = {name: re.search(text, row.words("notes")) for name, text in _NOTES.items()}
    missing = [name.replace("_", " ") for name, match in found.items() if match is None]
    missing += [lacks] if lacks else []
    missing += ["hardware"] if machine is None else []
    needed = ("n_devices", "global_batch_seqs", "seq_len_tokens")
    missing += [name for name in needed if row.count(name) is None]
    missing += row.unread
    if row.words("workload") != "rl_grpo":
        missing.append("what environments and tools take")
    parts = [row.get(name) for name in ("source_id", "model", "hardware", "n_devices")]
    head = {
        "line": row.line,
        "source_id": row.get("source_id"),
        "model": row.get("model"),
        "group": "|".join(parts),
        "measured_step_s": row.number("step_time_s") or float("nan"),
    }
    if missing or machine is None or shape is None:
        return RlRow(**head, missing=tuple(missing))  # type: ignore[arg-type]
    numbers = {name: int(match[1]) for name, match in found.items() if match}
    off = re.search(r"([1-9]\d*)-step off", row.words("notes"))
    devices = (row.count("n_devices") or 0) // (2 if off else 1)
    seq, batch = row.count("seq_len_tokens") or 0, row.count("global_batch_seqs") or 0
    if numbers["mean_tokens"] > seq:
        return RlRow(**head, missing=("an average length of at most seq_len_tokens",))  # type: ignore[arg-type]
    prompt = min(PROMPT_TOKENS, numbers["mean_tokens"] / 3.0)
    work = RlWork(
        num_answers=numbers["num_answers"],
        answers_per_update=batch,
        prompt_tokens=prompt,
        lengths=AnswerLengths(numbers["mean_tokens"] - prompt, seq - prompt),
        weights_bytes=float(_WEIGHT_BYTES * shape.num_params),
        num_trained=float(shape.num_params),
        staleness=int(off[1]) if off else 0,
    )
    precision = "fp8" if precision_of(row) == "fp8" else "bf16"
    plans = _update(row, devices, seq, batch * numbers["mean_tokens"], precision)
    if plans is None:
        return RlRow(**head, missing=("degrees that the devices divide by",))  # type: ignore[arg-type]
    return RlRow(
        **head,  # type: ignore[arg-type]
        machine=machine,
        shape=shape,
        plans=plans,
        work=work,
        precision=precision,
        serving_tensor=numbers["serving_tensor"],
        devices=devices,
        is_colocated=off is None,
    )


def _update(
    row: CsvRow, devices: int, seq: int, tokens: float, precision: str
) -> TrainingPlans | None:
    """One update on rows that are packed up to the longest sequence."""
    degrees = [row.count(name) or 1 for name in ("tp", "pp", "cp")]
    tensor, pipeline, context = degrees
    data = devices // (tensor * pipeline * context)
    if data < 1:
        return None
    return TrainingPlans(
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=min(row.count("ep") or 1, data * tensor * context),
        data=data,
        shard=data,
        zero=1,
        sequence_parallel=int(tensor > 1),
        row_tokens=seq,
        num_micro=tokens / seq / data,
        recompute=RECOMPUTE.index("full"),
        precision=precision,
        software="megatron",
    )


def predict_rl(
    rows: Sequence[RlRow], efficiency: RlEfficiency | None = None
) -> list[RlStep | None]:
    """The step of each row; None where inputs are missing."""
    return [_priced(row, efficiency or rl_efficiency()) for row in rows]


def _priced(row: RlRow, efficiency: RlEfficiency) -> RlStep | None:
    if row.shape is None or row.machine is None or row.plans is None or row.work is None:
        return None
    plans = serving_plans(
        row.shape, row.machine, tensor=row.serving_tensor, precision=row.precision, software="vllm"
    )
    answers = rollout(
        plans,
        serving_efficiency().rates(plans),
        num_engines=max(1.0, row.devices / row.serving_tensor),
        num_answers=row.work.num_answers,
        prompt_tokens=row.work.prompt_tokens,
        lengths=row.work.lengths,
    )
    update = training_step(row.shape, row.plans, row.machine)
    (step,) = rl_steps(
        row.work, row.machine, plans, answers, update,
        devices=row.devices, is_colocated=row.is_colocated, efficiency=efficiency,
    )  # fmt: skip
    return step
