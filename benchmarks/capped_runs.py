"""Twenty plans that are said to fit, run under a memory limit that the kernel enforces.

    sudo python benchmarks/capped_runs.py --json FILE

A control group gets what a plan is predicted to need, 8 % more (the planner's error in real runs),
and what two processes take before they train anything (measured once, with a model of nearly no
weights). A run that the kernel kills, or that fails, misses its gate. Linux with the memory
controller of control groups (version 1 or 2), root; decoders of 32 to 60 M parameters.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

from gated import main

from phalanx.doctor.machine import num_cores, processor_name
from phalanx.engines.whole.train_job import asked_anew, make_ready
from phalanx.job import load_job
from phalanx.report import Report

PROCESSES, NO_LIMIT = 2, 2**62
PEAK = "training/peak memory"
MEMORY_ERROR_FRAC = 0.08  # of real runs against the formula (docs/performance.md)
MODEL = {"model.layers": 6, "model.width": 512, "model.vocabulary": 32_768}
EMPTY = {"model.layers": 1, "model.width": 8, "model.vocabulary": 260}
COMMON = {
    "train.method": "pretrain",
    "train.steps": 2,
    "train.warmup_steps": 1,
    "train.eval_rows": 4,
    "data.max_rows": 400,
    "plan.hang_s": 120.0,  # a machine that swaps near its limit is slow, not hung
}
FLOAT32 = {"model.dtype": "float32"}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "replicas": {"plan.mesh": {"replicate": 2}, "plan.data": "replicate"} | FLOAT32,
    "FSDP": {"plan.mesh": {"shard": 2}, "plan.data": "fsdp"},
    "FSDP, wide": {"plan.mesh": {"shard": 2}, "plan.data": "fsdp", "model.width": 768},
    "FSDP, float32": {"plan.mesh": {"shard": 2}, "plan.data": "fsdp"} | FLOAT32,
    "tensor parallel": {"plan.mesh": {"tp": 2}, "plan.data": [], "plan.tensor": "megatron"}
    | FLOAT32,
}
RECOMPUTE, BATCH_TOKENS = ("none", "full"), (2048, 8192)


def plans() -> Iterator[tuple[str, dict[str, Any]]]:
    """Twenty of them."""
    for name, again, tokens in product(KINDS, RECOMPUTE, BATCH_TOKENS):
        keys = {"plan.recompute": again, "train.global_batch_tokens": tokens}
        yield f"{name}, recompute {again}, {tokens:,} tokens", dict(KINDS[name]) | keys


def needed_bytes(keys: Mapping[str, Any], folder: Path) -> float:
    """What the planner says that the processes need together, beside their libraries."""
    ready = make_ready(asked_anew(load_job(None, dict(keys)), folder), _to_stderr)
    rows = {str(row["quantity"]): row["value"] for row in ready.plan.predictions}
    return float(rows[PEAK])


def measured_bytes(folder: Path) -> float:
    """What they took, as the report of the run says."""
    report = Report.from_dict(json.loads((folder / "report.json").read_text()))
    found = [row.value for row in report.rows if (row.quantity, row.source) == (PEAK, "measured")]
    return float(found[0] or 0.0)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


class Group:
    """A control group with a memory limit."""

    def __init__(self, limit_bytes: float) -> None:
        root = Path("/sys/fs/cgroup")
        is_first = (root / "memory").is_dir()
        self.folder = (root / "memory" if is_first else root) / f"phalanx-{os.getpid()}"
        self.limit = "memory.limit_in_bytes" if is_first else "memory.max"
        self.peak = "memory.max_usage_in_bytes" if is_first else "memory.peak"
        self.folder.mkdir()
        (self.folder / self.limit).write_text(str(int(limit_bytes)))

    def run(self, command: Sequence[str]) -> int:
        """Exit status of a command inside."""
        enter = f"echo $$ > {self.folder}/cgroup.procs; exec {' '.join(command)}"
        return subprocess.run(["sh", "-c", enter], stdout=subprocess.DEVNULL).returncode

    def peak_bytes(self) -> int:
        """The most it had, files in memory included."""
        return int((self.folder / self.peak).read_text())


@contextmanager
def group(limit_bytes: float) -> Iterator[Group]:
    """A group that is removed again."""
    made = Group(limit_bytes)
    try:
        yield made
    finally:
        made.folder.rmdir()


def command(keys: Mapping[str, Any], folder: Path) -> list[str]:
    """`phalanx train` with these keys."""
    words = [sys.executable, "-m", "phalanx", "train", "--folder", str(folder)]
    for key, value in keys.items():
        items = value.items() if isinstance(value, Mapping) else [("", value)]
        for name, each in items:
            text = "[]" if each == [] else str(each)
            words += [f"--{key}.{name}" if name else f"--{key}", f"'{text}'"]
    return words


def make_report() -> Report:
    """Run all plans under their limits."""
    report = Report("Plans that fit, under limits that are enforced")
    report.notes["machine"] = f"{processor_name()}, {num_cores()} cores, {date.today()}"
    shared = {
        "model.name": "tiny",
        "data.source": "python-docs",
        "plan.devices": PROCESSES,
    } | COMMON
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with group(NO_LIMIT) as free:
            empty = shared | EMPTY | dict(KINDS["FSDP"])
            assert free.run(command(empty, folder / "empty")) == 0
            # what it took itself is not counted twice
            base_bytes = free.peak_bytes() - measured_bytes(folder / "empty")
        report.add("two processes that train nearly nothing", base_bytes, "bytes", "measured")
        for at, (words, keys) in enumerate(plans()):
            keys = shared | MODEL | keys
            needed = needed_bytes(keys, folder / f"asked-{at}")
            limit = base_bytes + needed * (1 + MEMORY_ERROR_FRAC)
            with group(limit) as capped:
                status = capped.run(command(keys, folder / f"run-{at}"))
                note = f"under {limit / 2**20:,.0f} MiB, of which {needed / 2**20:,.0f} predicted"
                report.add(f"exit status, {words}", status, "1", "measured", target=0.0, note=note)
            _to_stderr(f"{words}: {status}, {note}")
    return report


if __name__ == "__main__":
    sys.exit(main(make_report, __doc__))
