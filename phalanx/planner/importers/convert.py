"""A foreign plan as what the planner prices: keys of a job, and a row of the table of plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from phalanx.cost.training_plans import CONTEXT_KINDS, RECOMPUTE, SCHEDULES, TrainingPlans
from phalanx.errors import PlanError, nearest_numbers
from phalanx.layout.placement import divisors
from phalanx.planner.importers.foreign import ALL_LEFT, NOT_PRICED, ForeignPlan

IMPOSSIBLE = "emit/impossible"
_NAMES = {
    "tensor": "tensor parallel",
    "pipeline": "pipeline",
    "context": "context parallel",
    "expert": "expert parallel",
    "expert_tensor": "tensor parallel inside an expert",
    "shard": "ranks that share weights or moments",
    "zero": "ZeRO stage",
    "keeps_gathered": "weights kept gathered",
    "virtual": "chunks of a pipeline rank",
    "schedule": "pipeline schedule",
    "context_kind": "kind of context parallelism",
    "sequence_parallel": "sequence parallel",
    "micro_rows": "rows of a micro-batch",
    "num_micro": "micro-batches of a step",
    "recompute": "recomputation",
    "offload": "optimizer state in host memory",
}
_WORDS = {"recompute": RECOMPUTE, "schedule": SCHEDULES, "context_kind": CONTEXT_KINDS}


def job_keys(foreign: ForeignPlan, num_devices: int = 0) -> dict[str, Any]:
    """Keys of a job (dotted, for `load_job`) that the file states.

    Args:
        num_devices: a step's tokens depend on it where the file says what a device computes.
    """
    keys: dict[str, Any] = {}

    def add(key: str, value: Any) -> None:
        if value is not None:
            keys[key] = value

    add("model.name", foreign.model)
    add("data.source", foreign.data)
    if foreign.role == "serve":
        add("serve.max_tokens", foreign.max_tokens)
        add("serve.max_running", foreign.max_running)
        add("serve.max_step_tokens", foreign.max_step_tokens)
        return keys
    add("data.max_tokens", foreign.row_tokens)
    add("train.method", foreign.method)
    if foreign.method == "lora":
        add("train.lora_rank", foreign.lora_rank)
        add("train.lora_alpha", foreign.lora_alpha)
        add("train.lora_dropout", foreign.lora_dropout)
        targets = foreign.lora_targets or ()
        add("train.lora_targets", None if targets == ("all-linear",) else list(targets) or None)
    add("train.steps", foreign.steps)
    add("train.epochs", foreign.epochs)
    add("train.lr", foreign.lr)
    if foreign.master_dtype in ("float32", "bfloat16"):
        keys["train.master_dtype"] = foreign.master_dtype
    rows = step_rows(foreign, num_devices or foreign.devices or 0)
    if rows and foreign.row_tokens:
        keys["train.global_batch_tokens"] = rows * foreign.row_tokens
    return keys


def step_rows(foreign: ForeignPlan, num_devices: int) -> int:
    """Rows of a step over all devices; 0: the file does not say."""
    if foreign.step_rows:
        return foreign.step_rows
    if not (foreign.micro_rows and foreign.num_micro and num_devices):
        return 0
    return foreign.micro_rows * foreign.num_micro * data_ranks(foreign, num_devices)


def with_step_rows(
    foreign: ForeignPlan, num_devices: int, row_tokens: int, batch_tokens: int
) -> ForeignPlan:
    """The plan with rows of a step, also where the file names none (accelerate's).

    They fill the batch that is asked for, or they are a micro-batch on each data rank: a step of
    fewer rows than ranks would be compared with one that keeps all of them busy.

    Args:
        row_tokens: of each row.
        batch_tokens: of a step, as asked for; 0: nothing is.
    """
    taken = (foreign.tensor or 1) * (foreign.pipeline or 1) * (foreign.context or 1)
    if foreign.step_rows or (foreign.micro_rows and foreign.num_micro) or num_devices % taken:
        return foreign
    if batch_tokens:
        rows, origin = batch_tokens // row_tokens, "the batch that is asked for"
    else:
        rows = (foreign.micro_rows or 1) * (foreign.num_micro or 1) * (num_devices // taken)
        origin = "assumed: a micro-batch on each data rank"
    return replace(foreign, step_rows=rows, origin={**foreign.origin, "step_rows": origin})


def data_ranks(foreign: ForeignPlan, num_devices: int) -> int:
    """Ranks that compute different rows.

    Raises:
        PlanError: `emit/impossible` where the axes do not fit the devices.
    """
    taken = (foreign.tensor or 1) * (foreign.pipeline or 1) * (foreign.context or 1)
    if num_devices % taken:
        rule = f"is no multiple of tensor x pipeline x context = {taken}"
        legal = [taken * each for each in _around(num_devices / taken)]
        raise PlanError(IMPOSSIBLE, "devices", num_devices, rule, legal=legal)
    data = num_devices // taken
    over = data * (foreign.context or 1)
    if foreign.replicate and foreign.replicate > 0 and over % foreign.replicate:
        rule = f"does not divide the {over} data x context ranks of {num_devices} devices"
        near = nearest_numbers(foreign.replicate, divisors(over))
        raise PlanError(IMPOSSIBLE, "replicate", foreign.replicate, rule, legal=near)
    return data


def foreign_plans(foreign: ForeignPlan, num_devices: int, **columns: Any) -> TrainingPlans:
    """The file's plan on so many devices, as a table of one row.

    Args:
        columns: what the file does not know or the caller knows better: row_tokens,
            document_tokens, counted_frac, imbalance, software ...

    Raises:
        PlanError: `emit/impossible` for a server, for axes that do not fit the devices, and for a
            step that does not divide into whole micro-batches.
    """
    if foreign.role != "train":
        raise PlanError(IMPOSSIBLE, foreign.kind, None, "serves; it is no training plan")
    data = data_ranks(foreign, num_devices)
    context, micro = foreign.context or 1, foreign.micro_rows or 1
    tokens = columns.pop("row_tokens", None) or foreign.row_tokens
    if not tokens:
        raise PlanError(IMPOSSIBLE, foreign.kind, None, "says no length of rows: give --seq")
    expert = foreign.expert or 1
    given: dict[str, Any] = {
        "tensor": foreign.tensor or 1,
        "pipeline": foreign.pipeline or 1,
        "context": context,
        "expert": expert,
        "expert_tensor": foreign.expert_tensor or 1,
        "data": data,
        "shard": _shard(foreign, data, context),
        "zero": foreign.zero or 0,
        "keeps_gathered": int(bool(foreign.keeps_gathered)),
        "virtual": foreign.virtual or 1,
        "schedule": SCHEDULES.index(foreign.schedule or "1f1b"),
        "context_kind": CONTEXT_KINDS.index(foreign.context_kind or "all-gather"),
        "sequence_parallel": int(bool(foreign.sequence_parallel)),
        "micro_rows": micro,
        "row_tokens": tokens,
        "num_micro": _num_micro(foreign, data, micro),
        "recompute": RECOMPUTE.index(foreign.recompute or "none"),
        "offload": foreign.offload or 0.0,
        "method": foreign.method or "pretrain",
        "lora_rank": foreign.lora_rank or 0 if foreign.method == "lora" else 0,
        "base_bits": foreign.base_bits or 16,
        "precision": foreign.precision if foreign.precision not in (None, "fp32") else "bf16",
        "software": foreign.software,
    }
    return TrainingPlans(**(_canonical(given) | columns))


def _canonical(row: Mapping[str, Any]) -> dict[str, Any]:
    """A plan without choices that decide nothing in it: the schedule of no pipeline, and such."""
    kept = dict(row)
    if row["pipeline"] == 1:
        kept |= {"virtual": 1, "schedule": SCHEDULES.index("1f1b")}
    if row["context"] == 1:
        kept["context_kind"] = 0
    if row["expert"] == 1:
        kept["expert_tensor"] = row["tensor"]
    if row["tensor"] == 1:
        kept["sequence_parallel"] = 0
    if row["zero"] < 3 or row["shard"] == 1:
        kept["keeps_gathered"] = 0
    if row["shard"] == 1:
        kept["zero"] = 0
    return kept


def _shard(foreign: ForeignPlan, data: int, context: int) -> int:
    if not foreign.zero:
        return 1
    over = data * context
    if foreign.shard in (None, ALL_LEFT):
        return over // max(1, foreign.replicate or 1)
    assert foreign.shard is not None
    if over % foreign.shard:
        rule = f"does not divide the {over} data x context ranks"
        near = nearest_numbers(foreign.shard, divisors(over))
        raise PlanError(IMPOSSIBLE, "shard", foreign.shard, rule, legal=near)
    return foreign.shard


def _num_micro(foreign: ForeignPlan, data: int, micro: int) -> int:
    if not foreign.step_rows:
        return foreign.num_micro or 1
    if foreign.step_rows % (data * micro):
        rule = f"rows of a step are no multiple of {data} data ranks x {micro} rows"
        near = [each * data * micro for each in _around(foreign.step_rows / (data * micro))]
        raise PlanError(IMPOSSIBLE, "batch", foreign.step_rows, rule, legal=near)
    return foreign.step_rows // (data * micro)


def _around(value: float) -> list[int]:
    low = max(1, int(value))
    return sorted({low, low + 1}, key=lambda each: abs(each - value))


def changes(given: TrainingPlans, best: TrainingPlans) -> list[str]:
    """What to change of the given plan to have the better one: "tensor parallel 8 -> 2"."""
    before, after = _canonical(given.row(0)), _canonical(best.row(0))
    if all(row["expert_tensor"] == row["tensor"] for row in (before, after)):
        before = after | before | {"expert_tensor": after["expert_tensor"]}  # it follows tensor
    found = []
    for name, told in _NAMES.items():
        old, new = (_shown(name, table[name]) for table in (before, after))
        if old != new:
            found.append(f"{told} {old} -> {new}")
    return found


def _shown(name: str, value: float) -> str:
    if name in _WORDS:
        return _WORDS[name][int(value)]
    if name in ("keeps_gathered", "sequence_parallel"):
        return "yes" if value else "no"
    return f"{value:g}"


def told(foreign: ForeignPlan) -> list[tuple[str, str, str]]:
    """(what, value, where it stands) of all that was read, then of the keys that were not."""
    rows = [
        (name, _text(name, value), foreign.origin.get(name, ""))
        for name, value in foreign.stated().items()
    ]
    plain = [note for note in foreign.notes if note.kind == NOT_PRICED]
    rows += [
        (f"{note.kind}: {note.key}", note.text, note.where)
        for note in foreign.notes
        if note.kind != NOT_PRICED
    ]
    if plain:
        names = ", ".join(note.key for note in plain)
        rows.append((f"{NOT_PRICED}: {len(plain)} keys", names, ""))
    return rows


def _text(name: str, value: Any) -> str:
    if name == "shard" and value == ALL_LEFT:
        return "all that are left"
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    return str(value)
