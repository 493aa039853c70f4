"""The parallel plan of a published row, and what its framework implies without saying so.

What is implied, and by what:

- data ranks: devices over the other degrees; a degree that alone is missing likewise;
- context degree 1 where no column names it;
- micro-batches: global batch over micro-batch and data ranks; one micro-batch a step where a plan
  without pipeline names no global batch; a micro-batch of one row where a data rank has one row a
  step, or where a plan without pipeline has rows so long that its time hardly depends on it;
- sequence parallelism with tensor parallelism, for the families that do so (`row_software`);
- sharding where the column is empty: that of the family;
- experts over data ranks, for the families that do so;
- schedule: interleaved with several virtual stages, else 1F1B; of dense models of the families that
  interleave unasked, where neither column says anything: as many chunks a rank as divide its
  layers, at most six;
- no recomputation where unnamed (fused attention recomputes its own scores either way), but of
  whole layers where a run of a dense model that ended could not have fitted otherwise, for the
  families that do so; words other than "none" and "full" are read as selective.
"""

from __future__ import annotations

import re
from math import gcd, prod
from typing import Any

from phalanx.cost.model_shape import ModelShape
from phalanx.cost.training_plans import RECOMPUTE, SCHEDULES, TrainingPlans
from phalanx.lab.csv_rows import CsvRow
from phalanx.lab.row_software import (
    family_of,
    is_before_sequence_parallelism,
    precision_of,
    software_of,
)

_DEGREES = ("tp", "pp", "dp", "cp")
_SATURATING = 2048  # tokens of a row that fill a device's matrix products
_MOST_CHUNKS = 6  # of a pipeline rank, where recipes interleave without saying how finely
_UNSHARDED = r"none|no|off|ddp|data parallel(?:ism)?|replicated?|no_shard|no sharding"
LORA_RANK = 16  # where a row does not name one; times hardly depend on it


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
    columns: dict[str, Any] = {
        "tensor": degrees["tp"],
        "pipeline": degrees["pp"],
        "context": degrees["cp"],
        "data": degrees["dp"],
        **_sharding(row, degrees, software),
        **experts,
        **_order(row, degrees, shape, batch[1]),
        "sequence_parallel": int(_has_sequence_parallelism(row, degrees, software)),
        "micro_rows": batch[0],
        "num_micro": batch[1],
        "row_tokens": row_tokens,
        "recompute": RECOMPUTE.index(_recompute(row)),
    }
    plans = TrainingPlans(
        method=method,
        lora_rank=_lora_rank(row) if method == "lora" else 0,
        precision=precision,
        software=software,
        **columns,
    )
    return plans, []


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
    workload = row.words("workload")
    if "lora" in workload:
        return "lora"
    return "pretrain" if workload in ("", "pretrain") else "full"


def _lora_rank(row: CsvRow) -> int:
    match = re.search(r"rank ([1-9]\d*)", row.words("notes"))
    return int(match[1]) if match else LORA_RANK


def _sharding(row: CsvRow, degrees: dict[str, int], software: str) -> dict[str, int]:
    text = row.words("zero_or_fsdp")
    stage = re.search(r"zero(?:[- ]?(?:stage)?[- ]?)([0-3])", text)
    keeps = "shard_grad_op" in text or "no reshard" in text
    if not text:
        zero = 0 if is_before_sequence_parallelism(software) else family_of(row).zero
    elif re.fullmatch(_UNSHARDED, text):
        zero = 0
    elif "shard" in text or "fsdp" in text or "hsdp" in text:
        zero = 3
    else:
        zero = int(stage[1]) if stage else family_of(row).zero
    return {
        "zero": zero,
        "shard": _group(row, text, degrees) if zero else 1,
        "keeps_gathered": int(keeps and zero == 3),
    }


def _group(row: CsvRow, text: str, degrees: dict[str, int]) -> int:
    """Ranks that share what is sharded."""
    ranks = degrees["dp"] * degrees["cp"]
    named = re.search(r"(?:group |\()(\d+)(?:-way\))?", text)
    slices = re.search(r"([1-9]\d*) slice", row.words("interconnect"))
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
    if not row.get("ep") and family_of(row).spreads_experts:
        experts = max(layer.feed_forward.num_experts for layer in shape.layers)
        expert = gcd(experts, degrees["dp"])
    named = re.search(r"expert tp ([1-9]\d*)", row.words("notes"))
    cut = int(named[1]) if named else (degrees["tp"] if expert == 1 else 1)
    return {"expert": expert, "expert_tensor": cut}


def _expert_ranks(degrees: dict[str, int]) -> int:
    """Ranks of a pipeline stage, over which its experts are spread."""
    return degrees["tp"] * degrees["cp"] * degrees["dp"]


def _order(
    row: CsvRow, degrees: dict[str, int], shape: ModelShape | None, num_micro: int
) -> dict[str, int]:
    text = row.words("schedule")
    virtual = row.count("vpp") or _implied_chunks(row, degrees["pp"], shape, num_micro)
    virtual = virtual if degrees["pp"] > 1 else 1
    name = "interleaved" if virtual > 1 else "1f1b"
    for each in ("gpipe", "zbv", "zero-bubble", "dualpipe"):
        if each in text.replace(" ", "-"):
            name = each
    return {"virtual": virtual, "schedule": SCHEDULES.index(name)}


def _implied_chunks(row: CsvRow, stages: int, shape: ModelShape | None, num_micro: int) -> int:
    """Model chunks of a pipeline rank where a family interleaves unasked and nothing is printed."""
    text = row.words("schedule")
    may = family_of(row).interleaves and (not text or "interleaved" in text)
    if not may or shape is None or shape.expert_params or num_micro % stages:
        return 1
    layers = shape.num_layers
    each = next((n // stages for n in (layers, layers + 2) if n % stages == 0), 1)
    return max(n for n in range(1, _MOST_CHUNKS + 1) if each % n == 0)


def _has_sequence_parallelism(row: CsvRow, degrees: dict[str, int], software: str) -> bool:
    text = row.words("recompute")
    if "sequence parallel" in text:
        return "no sequence parallel" not in text and degrees["tp"] > 1
    does = family_of(row).sequence_parallel and not is_before_sequence_parallelism(software)
    return does and degrees["tp"] > 1


def _recompute(row: CsvRow) -> str:
    text = row.words("recompute")
    if not text or text.startswith("none"):
        return "none"
    return "full" if text.startswith("full") else "selective"
