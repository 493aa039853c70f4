"""What this machine needs for the operators of a model, measured in a few seconds and kept.

No torch here: processes of `operator_bench` measure, as many as will train.
"""

from __future__ import annotations

import json
import platform
import tempfile
from dataclasses import asdict, replace
from os import getloadavg
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from phalanx.cost.step_saved import keys_kept
from phalanx.cost.training import Workload, workload_of
from phalanx.data.batches import SampleStream, num_steps
from phalanx.data.cached import cache_folder, cached_file, content_key
from phalanx.data.prepare import Prepared
from phalanx.doctor.machine import num_cores, processor_name
from phalanx.engines.launch import launch_local
from phalanx.job import Job
from phalanx.models.adapter_folder import lora_of
from phalanx.models.config import DecoderConfig, to_huggingface
from phalanx.plan import locked_versions
from phalanx.planner.here import device_here, row_plan, tensor_bytes, training_shape
from phalanx.planner.training_shape import require_items

FORMAT_VERSION = 8
# How long rates hold: within a day the same steps took 20 to 40 % more or less on shared machines.
KEPT_S = 3600.0
_TIMEOUT_S = 120.0  # where every process has a core; other programs may compete for them
_WORKER = "phalanx.engines.operator_bench"


def calibrate(
    config: DecoderConfig, work: Workload, *, num_processes: int, device: str = "cpu"
) -> dict[str, Any]:
    """Rates of this machine for a training step, from the cache if they were just measured.

    Args:
        config: shapes and dtype of the model.
        work: method, rows and documents of the planned step.
        num_processes: processes that will train here.
        device: "cpu" or "cuda".

    Returns:
        A table that JSON can hold: "rates", rate key -> {"value", "unit", "cpu_value"} ("start":
        seconds that a process takes to be there); "made_of",
        what it was measured for; "measured_s", how long it took; "cores_frac", the share of its
        cores that this job got while measuring (much below 1: other programs compete).

    Raises:
        WorldError: when a measuring process fails.
    """
    made_of = {
        "format_version": FORMAT_VERSION,
        "machine": [platform.node(), processor_name(), num_cores()],
        "versions": locked_versions(),
        "config": to_huggingface(config),
        "work": {name: value for name, value in asdict(work).items() if name != "num_steps"},
        "num_processes": num_processes,
        "device": device,
    }
    path = cache_folder("calibration") / f"{content_key(made_of)}.json"

    def measure(new: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            task, answer = Path(folder) / "task.json", Path(folder) / "answer.json"
            task.write_text(json.dumps(made_of))
            start_s = perf_counter()
            timeout_s = _TIMEOUT_S * max(1.0, (num_processes + getloadavg()[0]) / num_cores())
            launch_local(_WORKER, [str(task), str(answer)], num_processes, timeout_s=timeout_s)
            rates = json.loads(answer.read_text())
        timed = [rate for rate in rates.values() if rate["cpu_value"]]
        table = {
            "made_of": made_of,
            "rates": rates,
            "measured_s": perf_counter() - start_s,
            "cores_frac": median(rate["cpu_value"] / rate["value"] for rate in timed),
        }
        new.write_text(json.dumps(table, indent=1) + "\n")

    return json.loads(cached_file(path, measure, KEPT_S).read_text())


def workload(job: Job, config: DecoderConfig, data: Prepared, num_ranks: int) -> Workload:
    """The typical step of a job on this many processes.

    Where `limits.memory_bytes` would be passed, rows of less than 512 tokens are taken if documents
    allow it.

    Raises:
        JobError, PlanError: for a mesh or a row length that cannot be.
    """
    train, shape = job.train, training_shape(job, config, num_ranks)
    rows = row_plan(job, data.longest, shape, device_here())
    stream = SampleStream(data.train, train.seed)
    steps = train.steps
    if train.epochs:
        steps = num_steps(stream, train.epochs, train.global_batch_tokens)

    gathers_keys, windows_seen = keys_kept(shape.specs)

    def with_rows(row_tokens: int) -> Workload:
        dealt = workload_of(
            data.train,
            config,
            num_steps=steps,
            global_batch_tokens=train.global_batch_tokens,
            row_tokens=row_tokens,
            multiple=rows["row_multiple"],
            num_ranks=shape.num_data_ranks,
            seed=train.seed,
            lora=lora_of(job, config),
            held_out=data.held_out.take(range(min(train.eval_rows, len(data.held_out)))),
            tensor_degree=shape.tensor_degree,
            splits_tokens=shape.splits_tokens,
            context_degree=shape.context_degree,
            least_items=shape.least_items,
        )
        return replace(dealt, gathers_keys=gathers_keys, windows_seen=windows_seen)

    work = with_rows(rows["row_tokens"])
    require_items(job, work, shape)
    limit, least = job.limits.memory_bytes, _rounded(data.longest, rows["row_multiple"])
    if limit and not job.plan.row_tokens and least < work.row_limit:
        if tensor_bytes(job, config, work, shape) > limit:
            return with_rows(least)
    return work


def _rounded(tokens: int, multiple: int) -> int:
    return -(-tokens // multiple) * multiple
