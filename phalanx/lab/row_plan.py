"""The parallel plan of a published row, and what its framework implies without saying so.

What is implied, and by what:

- data ranks: devices over the other degrees; a degree that alone is missing likewise;
- context degree 1 where no column names it;
- micro-batches: global batch over micro-batch and data ranks; one micro-batch a step where a plan
  without pipeline names no global batch; a micro-batch of one row where a data rank has one row a
  step, or where a plan without pipeline has rows so long that its time hardly depends on it;
- sequence parallelism with tensor parallelism, for the families that do so (`_FAMILIES`);
- sharding where the column is empty: that of the family;
- schedule: interleaved with several virtual stages, else 1F1B; no recomputation where unnamed
  (fused attention recomputes its own scores either way).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from math import prod

from phalanx.cost.model_shape import ModelShape
from phalanx.cost.training_plans import RECOMPUTE, SCHEDULES, TrainingPlans
from phalanx.lab.csv_rows import CsvRow

_DEGREES = ("tp", "pp", "dp", "cp")
_SATURATING = 2048  # tokens of a row that fill a device's matrix products
LORA_RANK = 16  # where a row does not name one; times hardly depend on it


@dataclass(frozen=True, slots=True)
class _Family:
    """What a framework does unasked.

    Attributes:
        pattern: of its name in tables.
        name: in the efficiency tables.
        zero: what it shards where a row does not say.
        sequence_parallel: with tensor parallelism.
    """

    pattern: str
    name: str
    zero: int
    sequence_parallel: bool


_FAMILIES = (
    _Family(r"megatron-deepspeed|deepspeed|gpt-neox", "megatron-deepspeed", 0, False),
    _Family(r"nanotron", "nanotron", 0, True),
    _Family(r"maxtext|jax|t5x|pathways", "maxtext", 3, False),
    _Family(r"automodel", "automodel", 3, True),
    _Family(r"composer|foundry", "composer", 3, True),
    _Family(r"torchtitan|fsdp", "torch", 3, True),
    _Family(r"neuron", "neuron", 1, True),
    _Family(r"llmboost|rocm|primus", "primus", 1, True),
    _Family(r"megatron|nemo|megascale|nvidia|ngc|mxnet|hai-llm", "megatron", 1, True),
    _Family(r"pytorch|torch", "torch", 3, True),
)
_OTHER = _Family("", "other", 0, True)
_BEFORE_SEQUENCE_PARALLELISM = 22.05  # Korthikanti et al., whose code also brought ZeRO 1 to it

_PRECISIONS = (
    (r"fp4|nvfp4|mxfp4", "fp4"),
    (r"fp8|int8", "fp8"),
    (r"bf16|bfloat16", "bf16"),
    (r"fp16|half|float16", "fp16"),
)


def software_of(row: CsvRow) -> str:
    """ "family:generation" as efficiency tables name it; the generation is YY.MM, or a version."""
    return _software(row.get("framework"), row.get("source_date"))


@cache
def _software(framework: str, date: str) -> str:
    release = r"(?:release|pytorch|nemo|ngc|torch)\s+v?(\d+\.\d+)"
    named = re.search(release, framework, re.IGNORECASE)
    return f"{_family_of(framework).name}:{named[1] if named else _year_and_month(date)}"


def precision_of(row: CsvRow) -> str:
    """Of matrix products; empty where the row does not say."""
    return _precision(row.get("dtype").lower())


@cache
def _precision(text: str) -> str:
    return next((name for pattern, name in _PRECISIONS if re.search(pattern, text)), "")


def _family(row: CsvRow) -> _Family:
    return _family_of(row.get("framework"))


@cache
def _family_of(framework: str) -> _Family:
    text = framework.lower()
    return next((each for each in _FAMILIES if re.search(each.pattern, text)), _OTHER)


def _year_and_month(text: str) -> str:
    match = re.search(r"(?:20)?(\d\d)[.\-](0[1-9]|1[0-2])(?!\d)", text)
    if match:
        return f"{match[1]}.{match[2]}"
    match = re.search(r"20(\d\d)", text)
    return f"{match[1]}.01" if match else ""


def _is_before_sequence_parallelism(software: str) -> bool:
    family, generation = software.split(":")
    digits = re.fullmatch(r"\d\d\.\d\d", generation)
    return (
        family == "megatron" and bool(digits) and float(generation) < _BEFORE_SEQUENCE_PARALLELISM
    )


def plan_of_row(row: CsvRow, shape: ModelShape | None) -> tuple[TrainingPlans | None, list[str]]:
    """The plan of a row as a table of one, and names of what is missing where there is none."""
    devices, row_tokens, precision = (
        row.count("n_devices"),
        row.count("seq_len_tokens"),
        precision_of(row),
    )
    missing = [
        name
        for name, value in (
            ("n_devices", devices),
            ("seq_len_tokens", row_tokens),
            ("dtype", precision),
        )
        if not value
    ]
    degrees = _degrees(row, devices) if devices else None
    batch = _batch(row, degrees) if degrees else None
    if devices and degrees is None:
        missing.append("tp, pp, cp and dp whose product is n_devices")
    if degrees and batch is None:
        missing.append("micro_batch_seqs and global_batch_seqs that dp divides")
    experts = _experts(row, degrees, shape) if degrees else {}
    if experts and degrees and _expert_ranks(degrees) % prod(experts.values()):
        missing.append("ep and expert TP that divide tp x cp x dp")
    if missing or degrees is None or batch is None or not row_tokens:
        return None, missing
    software = software_of(row)
    method = _method(row)
    columns = {
        "tensor": degrees["tp"],
        "pipeline": degrees["pp"],
        "context": degrees["cp"],
        "data": degrees["dp"],
        **_sharding(row, degrees, software),
        **experts,
        **_order(row, degrees),
        "sequence_parallel": int(_has_sequence_parallelism(row, degrees, software)),
        "micro_rows": batch[0],
        "num_micro": batch[1],
        "row_tokens": row_tokens,
        "recompute": RECOMPUTE.index(_recompute(row)),
        "lora_rank": _lora_rank(row) if method == "lora" else 0,
    }
    return TrainingPlans(method=method, precision=precision, software=software, **columns), []


def _degrees(row: CsvRow, devices: int) -> dict[str, int] | None:
    """Degrees whose product is the number of devices; None where they are not determined."""
    found = {name: row.count(name) for name in _DEGREES}
    if found["cp"] is None and any(found[name] is None for name in ("tp", "pp", "dp")):
        found["cp"] = 1
    if found["dp"] == devices:
        found = {name: value or 1 for name, value in found.items()}
    absent = [name for name, value in found.items() if value is None]
    rest = prod(value for value in found.values() if value)
    if len(absent) > 1 or devices % rest:
        return None
    if absent:
        found[absent[0]] = devices // rest
    degrees = {name: int(value or 1) for name, value in found.items()}
    return degrees if prod(degrees.values()) == devices else None


def _batch(row: CsvRow, degrees: dict[str, int]) -> tuple[int, int] | None:
    """Rows of a micro-batch, and micro-batches of a data rank in a step."""
    micro, batch = row.count("micro_batch_seqs"), row.count("global_batch_seqs")
    if batch is None:
        return (micro, 1) if micro and degrees["pp"] == 1 else None
    rows, left = divmod(batch, degrees["dp"])
    if left or not rows:
        return None
    if micro is None:
        saturates = degrees["pp"] == 1 and (row.count("seq_len_tokens") or 0) >= _SATURATING
        return (1, rows) if rows == 1 or saturates else None
    return None if rows % micro else (micro, rows // micro)


def _method(row: CsvRow) -> str:
    workload = row.get("workload").lower()
    if "lora" in workload:
        return "lora"
    return "pretrain" if workload in ("", "pretrain") else "full"


def _lora_rank(row: CsvRow) -> int:
    match = re.search(r"rank (\d+)", row.get("notes"), re.IGNORECASE)
    return int(match[1]) if match else LORA_RANK


def _sharding(row: CsvRow, degrees: dict[str, int], software: str) -> dict[str, int]:
    text = row.get("zero_or_fsdp").lower()
    stage = re.search(r"zero(?:[- ]?(?:stage)?[- ]?)(\d)", text)
    keeps = "shard_grad_op" in text or "no reshard" in text
    if not text:
        zero = 0 if _is_before_sequence_parallelism(software) else _family(row).zero
    elif "shard" in text or "fsdp" in text or "hsdp" in text:
        zero = 3
    else:
        zero = int(stage[1]) if stage else _family(row).zero
    return {
        "zero": zero,
        "shard": _group(row, text, degrees) if zero else 1,
        "keeps_gathered": int(keeps and zero == 3),
    }


def _group(row: CsvRow, text: str, degrees: dict[str, int]) -> int:
    """Ranks that share what is sharded."""
    ranks = degrees["dp"] * degrees["cp"]
    named = re.search(r"(?:group |\()(\d+)(?:-way\))?", text)
    slices = re.search(r"(\d+) slice", row.get("interconnect"))
    group = ranks
    if "hsdp" in text:
        group = row.count("devices_per_node") or ranks
    elif "dp over slices" in text and slices:
        group = ranks // int(slices[1])
    elif named:
        group = int(named[1])
    return group if 0 < group <= ranks and ranks % group == 0 else ranks


def _experts(row: CsvRow, degrees: dict[str, int], shape: ModelShape | None) -> dict[str, int]:
    """Expert parallelism; Megatron's recipes do not cut an expert unless they say so."""
    if shape is None or not shape.expert_params:
        return {}
    expert = row.count("ep") or 1
    named = re.search(r"expert tp (\d+)", row.get("notes"), re.IGNORECASE)
    cut = int(named[1]) if named else (degrees["tp"] if expert == 1 else 1)
    return {"expert": expert, "expert_tensor": cut}


def _expert_ranks(degrees: dict[str, int]) -> int:
    """Ranks of a pipeline stage, over which its experts are spread."""
    return degrees["tp"] * degrees["cp"] * degrees["dp"]


def _order(row: CsvRow, degrees: dict[str, int]) -> dict[str, int]:
    text = row.get("schedule").lower()
    virtual = (row.count("vpp") or 1) if degrees["pp"] > 1 else 1
    name = "interleaved" if virtual > 1 else "1f1b"
    for each in ("gpipe", "zbv", "zero-bubble", "dualpipe"):
        if each in text.replace(" ", "-"):
            name = each
    return {"virtual": virtual, "schedule": SCHEDULES.index(name)}


def _has_sequence_parallelism(row: CsvRow, degrees: dict[str, int], software: str) -> bool:
    text = row.get("recompute").lower()
    if "sequence parallel" in text:
        return "no sequence parallel" not in text and degrees["tp"] > 1
    does = _family(row).sequence_parallel and not _is_before_sequence_parallelism(software)
    return does and degrees["tp"] > 1


def _recompute(row: CsvRow) -> str:
    text = row.get("recompute").lower()
    if not text or text.startswith("none"):
        return "none"
    return "full" if text.startswith("full") else "selective"
