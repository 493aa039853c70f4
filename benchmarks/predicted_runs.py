"""Ten real training runs on this machine beside what was predicted before their first step.

    python benchmarks/predicted_runs.py --json FILE

Gemma 3 270M on two processes, few steps each: replicas, FSDP, tensor parallelism, recomputation,
row lengths, adapters and all weights. Gates: seconds of all steps within 10 %, peak memory within
6 %, and the order of the runs by seconds as predicted, where predictions lie 15 % apart. The
machine must be quiet.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from datetime import date
from itertools import combinations
from pathlib import Path
from typing import Any

from gated import main

import phalanx
from phalanx.doctor.machine import num_cores, processor_name
from phalanx.report import Report

STEPS, APART = 5, 1.15
COMMON = {
    "train.steps": STEPS,
    "train.warmup_steps": 1,
    "train.eval_rows": 4,
    "data.max_tokens": 256,
    "data.too_long": "drop",
}
SHARD, REPLICATE = {"shard": 2}, {"replicate": 2}
RUNS: Mapping[str, Mapping[str, Any]] = {
    "replicas": {"mesh": REPLICATE, "data": "replicate"},
    "replicas, half the batch": {"mesh": REPLICATE, "data": "replicate", "batch": 1024},
    "replicas, long rows": {"mesh": REPLICATE, "data": "replicate", "row_tokens": 1024},
    "replicas, recomputed": {"mesh": REPLICATE, "data": "replicate", "recompute": "full"},
    "FSDP": {"mesh": SHARD, "data": "fsdp"},
    "FSDP, recomputed": {"mesh": SHARD, "data": "fsdp", "recompute": "full"},
    "FSDP, twice the batch": {"mesh": SHARD, "data": "fsdp", "batch": 4096},
    "tensor parallel": {"mesh": {"tp": 2}, "tensor": "megatron", "data": []},
    "FSDP, rank 64": {"mesh": SHARD, "data": "fsdp", "lora_rank": 64},
    "FSDP, all weights": {"mesh": SHARD, "data": "fsdp", "method": "full"},
}
_TRAIN = {"batch": "global_batch_tokens", "lora_rank": "lora_rank", "method": "method"}


def keys_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of the job."""
    found: dict[str, Any] = dict(COMMON) | {"train.global_batch_tokens": 2048}
    for name, value in options.items():
        found[f"train.{_TRAIN[name]}" if name in _TRAIN else f"plan.{name}"] = value
    return found


def make_report() -> Report:
    """Run all of them."""
    report = Report("Ten training runs against their predictions")
    report.notes["machine"] = f"{processor_name()}, {num_cores()} cores, {date.today()}"
    report.notes["work"] = f"Gemma 3 270M, {STEPS} steps each"
    seconds: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for at, (name, options) in enumerate(RUNS.items()):
            run = phalanx.train(
                model="gemma3-270m",
                data="python-docs",
                procs=2,
                folder=Path(folder) / str(at),
                keys=keys_of(options),
                say=lambda text: print(text, file=sys.stderr),
            )
            seconds[name] = add_run(report, name, run.report)
    add_order(report, seconds)
    return report


def add_run(report: Report, name: str, run: Report) -> tuple[float, float]:
    """Rows of one run; returns (predicted, measured) seconds of a step."""
    found = {(row.quantity, row.source): row.value for row in run.rows}
    for quantity, frac in (("training/step time", 0.10), ("training/peak memory", 0.06)):
        predicted, measured = found[quantity, "formula"], found[quantity, "measured"]
        assert predicted is not None and measured is not None
        unit = next(row.unit for row in run.rows if row.quantity == quantity)
        where = f"{name}/{quantity.removeprefix('training/')}"
        report.add(where, predicted, unit, "formula")
        report.add(where, measured, unit, "measured", target=predicted, tolerance_frac=frac)
    step = "training/step time"
    return float(found[step, "formula"] or 0.0), float(found[step, "measured"] or 0.0)


def add_order(report: Report, seconds: Mapping[str, tuple[float, float]]) -> None:
    """Pairs of runs whose order was predicted wrongly."""
    told = [
        (a, b)
        for a, b in combinations(seconds.values(), 2)
        if max(a[0], b[0]) > APART * min(a[0], b[0])
    ]
    wrong = sum((a[0] < b[0]) != (a[1] < b[1]) for a, b in told)
    note = f"of {len(told)} pairs whose predictions lie {APART:g} apart"
    report.add("pairs in the wrong order", wrong, "1", "measured", target=0.0, note=note)


if __name__ == "__main__":
    sys.exit(main(make_report, __doc__))
