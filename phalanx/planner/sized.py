"""Every legal plan of a cluster for a training job, with its memory (`cost.training_memory`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phalanx.cost.training_memory import MemoryTerms, training_memory
from phalanx.cost.training_plans import COLUMNS, RECOMPUTE, TrainingPlans
from phalanx.cost.training_step import training_step
from phalanx.hardware import Cluster
from phalanx.layout.stage_split import legal_cuts
from phalanx.planner.answers import SizedPlan
from phalanx.planner.columns import Options, Table
from phalanx.planner.legality import NO_HOST, sizes_of
from phalanx.planner.runnable import obstacles
from phalanx.planner.space import list_layouts, num_plans, with_rows
from phalanx.planner.training import Training

MANY_PLANS = 60_000  # from here on, only those that can fit
MOST_PLANS = 60_000


def limit_of(cluster: Cluster, limit_bytes: float) -> float:
    """Bytes that a rank may fill: what the device leaves, or less where the job says so."""
    usable = cluster.machine.usable_bytes
    return min(limit_bytes, usable) if limit_bytes else usable


@dataclass(frozen=True)
class SizedPlans:
    """Every legal plan of a cluster with its memory.

    Attributes:
        table: columns of `TrainingPlans`, "longest_tokens" and "row_limit".
        plans: the same, for time.
        illegal: reason -> layouts.
        num_listed: plans that these were chosen from; 0: they are all.
    """

    training: Training
    table: Table
    plans: TrainingPlans
    memory: MemoryTerms
    illegal: Mapping[str, int]
    num_listed: int = 0

    def __len__(self) -> int:
        return len(self.table)

    def at(self, index: int) -> SizedPlan:
        """One of them."""
        blocked = _obstacles(self.training, self.table.columns)
        return SizedPlan(
            row=self.plans.row(index),
            row_limit=int(self.table["row_limit"][index]),
            terms={name: float(column[index]) for name, column in self.memory.terms.items()},
            high_bytes=float(self.memory.high_bytes[index]),
            host_bytes=float(self.memory.host_bytes[index]),
            missing=tuple(reason for reason, is_blocked in blocked.items() if is_blocked[index]),
        )

    def runnable(self) -> np.ndarray:
        """Which of them `phalanx train` runs."""
        found = np.ones(len(self), dtype=bool)
        for is_blocked in _obstacles(self.training, self.table.columns).values():
            found &= ~is_blocked
        return found

    def smallest(self, only: np.ndarray | None = None) -> SizedPlan | None:
        """The plan that needs the least memory, of those in a mask; None when there is none."""
        at = np.arange(len(self)) if only is None else np.flatnonzero(only)
        return self.at(int(at[self.memory.peak_bytes[at].argmin()])) if len(at) else None


def _obstacles(training: Training, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    has_experts = any(layer.feed_forward.num_experts for layer in training.shape.layers)
    found = obstacles(
        columns, casts=training.casts, has_experts=has_experts, most_stages=_most_stages(training)
    )
    everywhere = np.ones(len(columns["tensor"]), dtype=bool)
    for reason, is_so in (
        ("this architecture", training.config is None),
        (f"products in {training.precision}", training.precision != "bf16"),
        (f"frozen weights of {training.base_bits} bits", training.base_bits != 16),
    ):
        if is_so:
            found[reason] = everywhere
    return found


def _most_stages(training: Training) -> int:
    """That the layers can be cut into (`layout.stage_split`)."""
    if training.config is None:
        return 1
    config, trains_all = training.config, training.lora is None
    is_bare = trains_all and config.per_layer_embedding is None  # embedding or head may stand alone
    return len(legal_cuts(config)) - 1 + 2 * is_bare


def sized_plans(training: Training, cluster: Cluster, limit_bytes: float = 0.0) -> SizedPlans:
    """List the legal plans of a cluster and what memory they need.

    Moments move to host memory in plans that would not fit otherwise; elsewhere that only costs
    time. Of very many plans only those are listed whose smallest micro-batch fits, of more than
    `MOST_PLANS` the ones whose smallest micro-batch is fastest.
    """
    rows, choice = training.rows, training.choice
    sizes = sizes_of(
        training.shape,
        row_tokens=rows.longest,
        rows=rows.most_ranks,
        is_fixed=rows.is_fixed,
        domain=cluster.machine.devices_per_domain,
    )
    illegal: Counter[str] = Counter()
    recompute = [RECOMPUTE.index(each) for each in choice.recompute]
    trains_all, limit = training.method != "lora", limit_of(cluster, limit_bytes)
    layouts = list_layouts(
        sizes, cluster.num_devices, trains_all=trains_all, illegal=illegal, mesh=choice.mesh
    )
    count = num_plans(layouts, rows.options, recompute)
    is_large = count > MANY_PLANS
    if is_large:
        layouts = _promising(training, cluster, layouts, recompute, limit)
    table = with_rows(layouts, rows.options, recompute=recompute, illegal=illegal)
    table = table.joined(offload=np.zeros(len(table)))
    found = sized_table(training, cluster, table, illegal)
    found = replace(found, num_listed=count if is_large else 0)
    too_large = found.memory.peak_bytes > limit
    if not (trains_all and too_large.any()):
        return found
    apart = table.keep(too_large)
    apart = apart.joined(offload=np.ones(len(apart)))
    away = sized_table(training, cluster, apart, illegal)
    host = cluster.machine.host_memory
    if host is not None and (crowded := away.memory.host_bytes > host.value).any():
        illegal[NO_HOST] += int(crowded.sum())
        away = sized_table(training, cluster, apart.keep(~crowded), illegal)
    return _stacked(found, away) if len(away) else found


def _stacked(first: SizedPlans, second: SizedPlans) -> SizedPlans:
    """Rows of both."""

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(each.memory, name) for each in (first, second)])

    terms = {
        name: np.concatenate([column, second.memory.terms[name]])
        for name, column in first.memory.terms.items()
    }
    held: dict[str, Any] = {
        name: joined(name) for name in ("logged_bytes", "host_bytes", "all_busy")
    }
    memory = replace(first.memory, terms=terms, **held)
    table = first.table.stacked(second.table)
    columns: dict[str, Any] = {name: table[name] for name in COLUMNS if name in table.columns}
    plans = replace(first.plans, **columns)
    return replace(first, table=table, plans=plans, memory=memory)


def _promising(
    training: Training,
    cluster: Cluster,
    layouts: Table,
    recompute: Sequence[int],
    limit_bytes: float,
) -> Table:
    """Layouts whose smallest micro-batch fits; all where none does; not too many."""

    def least(data_ranks: int) -> Options:
        return {name: each[:1] for name, each in training.rows.options(data_ranks).items()}

    known = layouts.joined(layout=np.arange(len(layouts)))
    table = with_rows(known, least, recompute=recompute, illegal=Counter())
    table = table.joined(offload=np.full(len(table), float(training.method != "lora")))
    sized = sized_table(training, cluster, table, {})
    peak = sized.memory.peak_bytes
    fits = peak <= max(limit_bytes, float(peak.min(initial=np.inf)))
    unseen = np.setdiff1d(known["layout"], table["layout"])  # legal with larger micro-batches only
    table = table.keep(fits)
    seconds = training_step(training.shape, sized.plans.take(fits), cluster.machine).total_s
    chosen, first = np.unique(table["layout"][np.argsort(seconds)], return_index=True)
    chosen = np.concatenate([chosen[np.argsort(first)], unseen])  # fastest first
    rows_of = training.rows.options
    ways = {int(n): len(rows_of(int(n))["row_tokens"]) for n in np.unique(layouts["data"])}
    of_each = np.array([ways[int(n)] for n in layouts["data"][chosen]]) * len(recompute)
    room = np.searchsorted(np.cumsum(of_each), MOST_PLANS, side="right")
    return layouts.keep(np.sort(chosen[: max(1, int(room))]))


def sized_table(
    training: Training, cluster: Cluster, table: Table, illegal: Mapping[str, int]
) -> SizedPlans:
    """The memory of listed plans.

    Args:
        table: columns of `TrainingPlans`, "longest_tokens" and "row_limit".
    """
    columns = {name: table[name] for name in COLUMNS if name in table.columns}
    plans = TrainingPlans(
        **columns,
        expert_imbalance=training.expert_imbalance,
        method=training.method,
        lora_rank=training.lora.rank if training.lora else 0,
        lora_targets=training.lora_targets,
        base_bits=training.base_bits,
        precision=training.precision,
        software=training.software_on(cluster.machine),
    )
    longest = replace(plans, row_tokens=table["longest_tokens"])
    memory = training_memory(training.shape, longest, cluster.machine)
    return SizedPlans(training, table, plans, memory, illegal)


def smallest_plan(training: Training, cluster: Cluster) -> SizedPlan | None:
    """The plan that needs the least memory of a rank, one that runs where any does; None when no
    plan is legal."""
    plans = sized_plans(training, cluster)
    runs = plans.runnable()
    return plans.smallest(runs if runs.any() else None)
