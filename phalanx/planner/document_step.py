"""A step with the documents that every data rank really has: what `simulate --documents` plays.

The file has a line of JSON per data rank: a list of micro-batches, each a list of the lengths of
its documents, in tokens. No torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.cost.training_plans import RECOMPUTE, SCHEDULES, TrainingPlans
from phalanx.errors import JobError, shown
from phalanx.hardware import Cluster, parse_cluster
from phalanx.job import Job
from phalanx.planner.make import mesh_of, policy_tables
from phalanx.planner.models import priced_model
from phalanx.planner.refined import PLAYED, DocumentStep, play_documents
from phalanx.planner.step_picture import PassSpan
from phalanx.policy import Spec
from phalanx.registry import build
from phalanx.report import Report
from phalanx.strict import read_value
from phalanx.trace import Trace, TraceBuilder

Documents = list[list[list[int]]]


@dataclass(frozen=True)
class SimulatedDocuments:
    """One step.

    Attributes:
        report: step time, its spread over data ranks, idle share.
        step: times of every pass of every rank.
        job: its name.
    """

    report: Report
    step: DocumentStep
    job: str

    def spans(self) -> list[PassSpan]:
        """The passes of the slowest data rank's pipeline."""
        played, slowest = self.step.played, self.slowest
        starts, ends = played.start_s[:, slowest], played.end_s[:, slowest]
        found = [
            PassSpan(row.rank, str(row.step), row.step.kind, row.step.item, start_s, end_s)
            for row, start_s, end_s in zip(played.wired.rows, starts.tolist(), ends.tolist())
        ]
        return sorted(found, key=lambda span: (span.place, span.start_s))

    @property
    def slowest(self) -> int:
        """The data rank that the others wait for."""
        return int(self.step.pipeline_s.argmax())

    def trace(self) -> Trace:
        """The same passes as a table; ranks are places in the pipeline."""
        builder = TraceBuilder("simulated", self.job)
        builder.notes["data_rank"] = self.slowest
        for span in self.spans():
            builder.add(
                role="train", rank=span.place, step=1, action_id=span.name, item=span.item,
                phase=span.phase, operator="stage", lane="compute", start_s=span.start_s,
                dur_s=span.end_s - span.start_s,
            )  # fmt: skip
        return builder.build()


def read_documents(path: str) -> Documents:
    """The lengths of a file.

    Raises:
        JobError: `job/not-found`, `job/syntax` or `job/bad-value` with the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is not text"
        raise JobError("job/not-found", "--documents", path, f"cannot be read: {reason}") from error
    found: Documents = []
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise JobError("job/syntax", where, shown(line), "is not valid JSON") from error
        found.append(read_value(value, list[list[int]], where))
    return found


def simulate_documents(job: Job, documents: Documents, on: str = "") -> SimulatedDocuments:
    """Play one step of the plan that a job writes down.

    Args:
        documents: data rank -> micro-batch -> lengths.
        on: cluster shorthand, instead of the job's.

    Raises:
        JobError: from the job's plan; `job/bad-value` for documents of another number of ranks, a
            schedule without an order, or axes that the plan's policies leave unused.
    """
    cluster = parse_cluster(on or job.plan.on)
    if not documents or not documents[0]:
        rule = "needs a line per data rank, each with a micro-batch at least"
        raise JobError("job/bad-value", "documents", len(documents), rule)
    plan = _plan(job, cluster, documents)
    shape = priced_model(job).sizes
    step = play_documents(shape, plan, cluster.machine, documents)
    report = Report(f"{job.name} on {cluster}, documents of {len(documents)} data ranks")
    _add_rows(report, step, documents, cluster)
    return SimulatedDocuments(report, step, job.name)


def _plan(job: Job, cluster: Cluster, documents: Documents) -> TrainingPlans:
    """The job's plan as a row of the table that prices read."""
    mesh = mesh_of(job, cluster.num_devices)
    order, spec_tables = policy_tables(job, mesh)
    specs: list[Spec] = [
        build(str(table["family"]), {k: v for k, v in table.items() if k != "family"}, "plan")
        for table in spec_tables
    ]
    degree = {"pipeline": mesh.degree("pp"), "data": 1, "tensor": 1, "context": 1, "shard": 1}
    for spec in specs:
        degree[spec.family] *= mesh.degree(spec.axis)
        if spec.policy_name == "fsdp":
            degree["shard"] *= mesh.degree(spec.axis)
    used = degree["pipeline"] * degree["data"] * degree["tensor"] * degree["context"]
    if used != mesh.size:
        rule = f"policies of this plan use {used} of {mesh.size} devices; name one for each axis"
        raise JobError("job/bad-value", "plan.mesh", str(mesh), rule, legal=[used])
    if order["name"] not in PLAYED:
        rule = "this schedule has no order to play"
        raise JobError("job/bad-value", "plan.pipeline", order["name"], rule, legal=PLAYED)
    columns: dict[str, Any] = {
        **degree,
        "zero": 3 if degree["shard"] > 1 else 0,
        "virtual": order.get("virtual", 2) if order["name"] == "interleaved" else 1,
        "schedule": SCHEDULES.index(order["name"]),
        "num_micro": len(documents[0]),
        "row_tokens": max(1, *(sum(lengths) for rank in documents for lengths in rank)),
        "recompute": RECOMPUTE.index(job.plan.recompute),
        "sequence_parallel": int(any(getattr(s, "sequence_parallel", False) for s in specs)),
    }
    is_lora = job.train.method == "lora"
    return TrainingPlans(
        **columns,
        method=job.train.method,
        lora_rank=job.train.lora_rank if is_lora else 0,
        software="maxtext" if cluster.machine.cores_per_device else "torch",
    )


def _add_rows(report: Report, step: DocumentStep, documents: Documents, cluster: Cluster) -> None:
    tokens = sum(sum(lengths) for rank in documents for lengths in rank)
    note = f"rates of {cluster.machine.title}"
    report.add("step time", step.step_s, "s", "simulated", note=note)
    report.add("tokens of a step", tokens, "1", "formula")
    report.add("throughput", tokens / step.step_s, "tokens/s", "simulated")
    slowest, mean = float(step.pipeline_s.max()), float(step.pipeline_s.mean())
    report.add("passes of the slowest data rank", slowest, "s", "simulated",
               note=f"data rank {int(step.pipeline_s.argmax())}")  # fmt: skip
    report.add("slowest data rank over the mean", slowest / mean, "1", "simulated")
    report.add("work of the heaviest data rank over the mean", step.work_imbalance, "1", "formula")
    idle = step.played.idle_frac
    report.add("idle share of compute, mean over ranks", idle, "1", "simulated")
    worst = 1.0 - float(np.min(step.played.busy_s)) / slowest
    report.add("idle share of compute, worst rank", worst, "1", "simulated")
