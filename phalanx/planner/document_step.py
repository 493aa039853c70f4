"""A step with the documents that every data rank really has: what `simulate --documents` plays.

The file has a line of JSON per data rank: a list of micro-batches, each a list of the lengths of
its documents, in tokens. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.cost.training_plans import TrainingPlans
from phalanx.errors import JobError, shown
from phalanx.hardware import Cluster, parse_cluster
from phalanx.job import Job
from phalanx.planner.cuts import written_cut
from phalanx.planner.make import mesh_of, policy_tables
from phalanx.planner.models import PricedModel, priced_model
from phalanx.planner.refined import PLAYED, DocumentStep, play_documents
from phalanx.planner.step_picture import PassSpan
from phalanx.planner.written import layout_columns, schedule_of, written_plan
from phalanx.policy import Order, Spec
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
        PlanError: from `layout.stage_split.job_stages`.
    """
    cluster = parse_cluster(on or job.plan.on)
    if not documents or not documents[0]:
        rule = "needs a line per data rank, each with a micro-batch at least"
        raise JobError("job/bad-value", "documents", len(documents), rule)
    model = priced_model(job)
    plan = _plan(job, cluster, model, documents)
    cut = written_cut(job, model, int(plan.pipeline))
    step = play_documents(model.sizes, plan, cluster.machine, documents, cut)
    report = Report(f"{job.name} on {cluster}, documents of {len(documents)} data ranks")
    _add_rows(report, step, documents, cluster)
    return SimulatedDocuments(report, step, job.name)


def _plan(job: Job, cluster: Cluster, model: PricedModel, documents: Documents) -> TrainingPlans:
    """The job's plan as a row of the table that prices read."""
    mesh = mesh_of(job, cluster.num_devices)
    order_table, spec_tables = policy_tables(job, mesh)
    specs: list[Spec] = [_built(table) for table in spec_tables]
    order: Order = _built(order_table)
    if mesh.degree("pp") > 1 and schedule_of(order) not in PLAYED:
        rule = "this schedule has no order to play"
        raise JobError("job/bad-value", "plan.pipeline", order_table["name"], rule, legal=PLAYED)
    shape = model.sizes
    has_experts = any(layer.feed_forward.num_experts for layer in shape.layers)
    layout = layout_columns(mesh, order, specs, has_experts=has_experts)
    used = prod(layout[family] for family in ("pipeline", "data", "tensor", "context"))
    if used != mesh.size:
        rule = f"policies of this plan use {used} of {mesh.size} devices; name one for each axis"
        raise JobError("job/bad-value", "plan.mesh", str(mesh), rule, legal=[used])
    longest = max(1, *(sum(lengths) for rank in documents for lengths in rank))
    rows = {"row_tokens": longest, "num_micro": len(documents[0])}
    return written_plan(job, cluster.machine, shape, layout, rows, model.config)


def _built(table: Mapping[str, Any]) -> Any:
    options = {name: value for name, value in table.items() if name != "family"}
    return build(str(table["family"]), options, f"plan.{table['family']}")


def _add_rows(report: Report, step: DocumentStep, documents: Documents, cluster: Cluster) -> None:
    tokens = sum(sum(lengths) for rank in documents for lengths in rank)
    note = f"rates of {cluster.machine.title}, fitted to published runs as `phalanx plan` has them"
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
