"""The plan that another program's configuration names, priced beside the best one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from phalanx.cost.training_plans import COLUMNS, TrainingPlans
from phalanx.cost.training_price import HOST_LINK_BYTES_PER_S
from phalanx.cost.training_step import training_step
from phalanx.errors import PlanError
from phalanx.planner.answers import Answer, PricedPlan, priced_plan
from phalanx.planner.columns import Table
from phalanx.planner.importers import ForeignPlan, changes, foreign_plans
from phalanx.planner.importers.convert import step_rows
from phalanx.planner.sized import sized_table
from phalanx.planner.training import Training


@dataclass(frozen=True)
class Given:
    """A file's plan on one cluster.

    Attributes:
        answer: what the cluster can do.
        plan: priced; None where it cannot be laid on the cluster.
        changes: from it to the best plan, in words; or why it cannot be laid there.
        step_tokens: of its step, which grows with the devices where a file says what each computes.
    """

    answer: Answer
    plan: PricedPlan | None
    changes: tuple[str, ...]
    step_tokens: int = 0

    @property
    def fits(self) -> bool:
        """Whether its memory, and that of the host, is expected to suffice."""
        return (
            self.plan is not None
            and self.plan.sized.peak_bytes <= self.answer.limit_bytes
            and self.plan.sized.host_bytes <= self.host_limit_bytes
        )

    @property
    def has_other_batch(self) -> bool:
        """Whether its step has other tokens than the job's, and so than the best plan's."""
        return self.step_tokens != self.answer.training.batch_tokens

    @property
    def gain_frac(self) -> float:
        """Share of its time for a token that the best plan saves."""
        if self.plan is None or self.answer.best is None:
            return 0.0
        times = self.step_tokens / self.answer.training.batch_tokens
        return 1.0 - times * self.answer.best.total_s / self.plan.total_s

    @property
    def host_limit_bytes(self) -> float:
        """Host memory of a device; infinite where nobody says."""
        host = self.answer.asked.cluster.machine.host_memory
        return host.value if host is not None else inf

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        table: dict[str, Any] = {"cluster": str(self.answer.asked.cluster), "fits": self.fits}
        table["changes"] = list(self.changes)
        if self.plan is not None:
            sized = self.plan.sized
            table |= {"words": sized.describe(), "columns": dict(sized.row)}
            table |= {"step_tokens": self.step_tokens, "gain_frac": self.gain_frac}
            table |= {"step_s": self.plan.total_s, "least_s": self.plan.low_s}
            table |= {"most_s": self.plan.high_s, "peak_bytes": sized.peak_bytes}
            table |= {"host_state_bytes": sized.host_bytes}
            table |= {"memory": dict(sized.terms), "seconds": dict(self.plan.parts)}
        return table


def given_plan(foreign: ForeignPlan, answer: Answer) -> Given:
    """Price a file's plan where an answer was found, and say what the best plan does otherwise."""
    training, cluster = answer.training, answer.asked.cluster
    try:
        plans = foreign_plans(
            foreign, cluster.num_devices, row_tokens=_row_tokens(foreign, training)
        )
    except PlanError as error:
        return Given(answer, None, (str(error),))
    table = _table(foreign, training, plans)
    sized = sized_table(training, cluster, table, {})
    times = training_step(training.shape, sized.plans, cluster.machine)
    priced = priced_plan(sized.at(0), times, 0)
    best = () if answer.best is None else _to(answer.best, sized.plans)
    if foreign.offloads_weights:
        priced = _with_weights_away(priced)
        best = (*best, "weights in host memory yes -> no") if answer.best is not None else ()
    tokens = step_rows(foreign, cluster.num_devices) * (foreign.row_tokens or training.seq_tokens)
    return Given(answer, priced, best, tokens or training.batch_tokens)


def _with_weights_away(plan: PricedPlan) -> PricedPlan:
    """The same with weights and gradients in host memory too, as FSDP and ZeRO-3 offload them.

    A rank's part of the weights crosses the host's link for the forward and for the backward pass
    of every micro-batch, its gradients once; products hide the way, as far as they last so long.
    """
    terms, row = dict(plan.sized.terms), plan.sized.row
    weights, gradients = terms["weights"], terms["gradients"]
    terms |= {"weights": 0.0, "gradients": 0.0}
    passes = 1 if row["keeps_gathered"] else 2
    way_s = row["num_micro"] * (passes * weights + gradients) / HOST_LINK_BYTES_PER_S
    products_s = sum(plan.parts.get(name, 0.0) for name in ("compute", "recompute"))
    waits_s = max(0.0, way_s - products_s)
    sized = replace(
        plan.sized,
        terms=terms,
        high_bytes=plan.sized.high_bytes - weights - gradients,
        host_bytes=plan.sized.host_bytes + weights + gradients,
    )
    return replace(
        plan,
        sized=sized,
        parts={**plan.parts, "host": waits_s},
        low_s=plan.low_s + waits_s,
        high_s=plan.high_s + way_s,
    )


def _to(best: PricedPlan, given: TrainingPlans) -> tuple[str, ...]:
    row: dict[str, Any] = dict(best.sized.row)
    return tuple(changes(given, TrainingPlans(**row)))


def _row_tokens(foreign: ForeignPlan, training: Training) -> int:
    """Of a row: as the file says where rows are packed, else of the longest of a micro-batch."""
    if training.profile is None or foreign.packed is not False:
        return foreign.row_tokens or training.rows.longest
    rows = foreign.micro_rows or 1
    longest = training.profile.quantile(rows / (rows + 1.0))
    return min(longest, foreign.row_tokens or longest)


def _table(foreign: ForeignPlan, training: Training, plans: TrainingPlans) -> Table:
    """One row, with what the data says of documents and targets."""
    columns: Mapping[str, np.ndarray] = plans.columns()
    row = {name: columns[name] for name in COLUMNS if name != "expert_imbalance"}
    tokens = row["row_tokens"]
    longest = tokens
    if training.profile is not None:
        ways = training.rows.options(int(row["data"][0]))
        for name in ("document_tokens", "counted_frac", "imbalance"):
            row[name] = np.array([ways[name][0]])
        row["document_tokens"] = np.minimum(row["document_tokens"], tokens)
        if foreign.packed is False:
            longest = np.minimum(training.profile.longest, foreign.row_tokens or np.inf)
            longest = np.array([float(longest)])
    return Table({**row, "longest_tokens": longest, "row_limit": row["micro_rows"] * longest})
