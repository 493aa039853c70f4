"""Which plan of a cluster is best for a training job: all are priced, those that fit are ranked.

Memory is `cost.step_memory`, seconds are `cost.cluster_step` with the bars of `cost.efficiency`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from phalanx.cost.cluster_step import OperatorGroup, StepSeconds, operator_groups, step_seconds
from phalanx.cost.efficiency import Efficiency, efficiency_of
from phalanx.cost.local_shapes import local_config
from phalanx.cost.step_memory import Unit, memory_terms, saved_bytes_per_token, units_of
from phalanx.cost.step_work import Workload, row_tokens_for
from phalanx.hardware import Cluster
from phalanx.models.config import DTYPE_BYTES, DecoderConfig
from phalanx.planner.candidates import Candidate, Layout, layouts, row_choices
from phalanx.planner.clusters import AskedCluster, device_rates
from phalanx.planner.training import Training

OBJECTIVES = ("time", "cost", "memory")
# peaks of real runs stayed within so much of the formula (docs/performance.md); a plan with less
# room than that is chosen only where there is no other
MEMORY_ERROR_FRAC = 0.08


@dataclass(frozen=True, kw_only=True)
class Sized:
    """A candidate with its memory.

    Attributes:
        terms: name -> bytes of a rank at the peak.
    """

    candidate: Candidate
    work: Workload
    terms: Mapping[str, float]

    @cached_property
    def peak_bytes(self) -> float:
        """Of the fullest rank."""
        return sum(self.terms.values())

    @property
    def largest_term(self) -> str:
        """What memory is needed for most."""
        return max(self.terms, key=lambda name: self.terms[name])


@dataclass(frozen=True, kw_only=True)
class PricedPlan:
    """A candidate with its memory and its time."""

    sized: Sized
    seconds: StepSeconds

    @property
    def candidate(self) -> Candidate:
        """The plan."""
        return self.sized.candidate


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a cluster can do for a training job.

    Attributes:
        limit_bytes: what a rank may fill.
        limit_s: of the whole job (0: none).
        best: the best plan that fits; None when none does.
        smallest: the plan that needs the least memory; None when there is no legal plan.
        num_plans, num_fit: legal plans, and those that fit.
        num_alike: of these, plans whose time lies within the bar of the best one.
        illegal: reason -> layouts that cannot exist.
    """

    asked: AskedCluster
    training: Training
    efficiency: Efficiency
    limit_bytes: float
    limit_s: float
    best: PricedPlan | None
    smallest: Sized | None
    num_plans: int
    num_fit: int
    num_alike: int
    illegal: Mapping[str, int]

    @property
    def fits(self) -> bool:
        """Whether the best plan stays within memory, and is expected to within the time."""
        if self.best is None:
            return False
        return not self.limit_s or 3600 * self.hours[0] <= self.limit_s

    @property
    def verdict(self) -> str:
        """fits, tight (less room than the formula's error), too slow, does not fit, no plan."""
        if self.best is None:
            return "does not fit" if self.smallest else "no legal plan"
        if not self.fits:
            return "too slow"
        return "tight" if is_tight(self.best.sized.peak_bytes, self.limit_bytes) else "fits"

    @property
    def hours(self) -> tuple[float, float, float]:
        """(expected, least, most) of the whole job; a plan that fits is needed."""
        assert self.best is not None
        step = self.efficiency.step_s(self.best.seconds.total_s)
        expected, least, most = (each * self.training.num_steps / 3600 for each in step)
        return expected, least, most

    @property
    def dollars(self) -> tuple[float, float, float]:
        """(expected, least, most) at the price of the machine's file."""
        cluster = self.asked.cluster
        rate = cluster.machine.price.value * cluster.num_devices
        expected, least, most = (each * rate for each in self.hours)
        return expected, least, most

    @property
    def bound(self) -> tuple[str, float]:
        """What most of the step is spent on, and its share."""
        assert self.best is not None
        shares = self.best.seconds.shares()
        name = max(shares, key=lambda each: shares[each])
        return name, shares[name]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        cluster = self.asked.cluster
        table: dict[str, Any] = {
            "cluster": str(cluster),
            "asked": self.asked.text,
            "note": self.asked.note,
            "fits": self.fits,
            "verdict": self.verdict,
            "usable_bytes": self.limit_bytes,
            "plans": self.num_plans,
            "plans_that_fit": self.num_fit,
            "indistinguishable": self.num_alike,
            "illegal": dict(self.illegal),
            "efficiency": self.efficiency.describe(),
        }
        sized = self.best.sized if self.best else self.smallest
        if sized is not None:
            table["peak_bytes"], table["memory"] = sized.peak_bytes, dict(sized.terms)
            table["plan"] = {
                "mesh": sized.candidate.layout.mesh.to_dict(),
                "specs": sized.candidate.layout.tables(),
                "row_tokens": sized.candidate.row_tokens,
                "recompute": sized.candidate.recompute,
            }
        if self.best is not None:
            names = ("expected", "least", "most")
            table["hours"] = dict(zip(names, self.hours))
            table["dollars"] = dict(zip(names, self.dollars))
            table["formula_step_s"] = self.best.seconds.total_s
            table["seconds"] = dict(self.best.seconds.parts)
            table["shares"] = self.best.seconds.shares()
        return table


def limit_of(cluster: Cluster, limit_bytes: float) -> float:
    """Bytes that a rank may fill: what the device leaves, or less where the job says so."""
    usable = cluster.machine.usable_bytes
    return min(limit_bytes, usable) if limit_bytes else usable


def answer(
    training: Training,
    asked: AskedCluster,
    *,
    minimise: str = "time",
    limit_bytes: float = 0.0,
    limit_s: float = 0.0,
) -> Answer:
    """Price every legal plan of a cluster.

    Args:
        minimise: "time", "cost" (the same on one cluster) or "memory".
        limit_bytes: of a rank (0: what the device leaves).
        limit_s: of the whole job (0: none).
    """
    cluster = asked.cluster
    illegal: Counter[str] = Counter()
    limit = limit_of(cluster, limit_bytes)
    sized = list(_sized_plans(training, cluster, illegal))
    plans = [priced(training, cluster, each) for each in sized if each.peak_bytes <= limit]
    efficiency = efficiency_of(cluster.machine, training.method)
    best = min(plans, key=lambda plan: _rank(plan, minimise, limit), default=None)
    most_s = efficiency.step_s(best.seconds.total_s)[2] if best else 0.0
    alike = [p for p in plans if efficiency.step_s(p.seconds.total_s)[0] <= most_s]
    return Answer(
        asked=asked,
        training=training,
        efficiency=efficiency,
        limit_bytes=limit,
        limit_s=limit_s,
        best=best,
        smallest=min(sized, key=lambda each: each.peak_bytes, default=None),
        num_plans=len(sized),
        num_fit=len(plans),
        num_alike=len(alike),
        illegal=dict(illegal),
    )


def _rank(plan: PricedPlan, minimise: str, limit_bytes: float) -> tuple[bool, float, float]:
    seconds, peak = plan.seconds.total_s, plan.sized.peak_bytes
    order = (peak, seconds) if minimise == "memory" else (seconds, peak)
    return (is_tight(peak, limit_bytes), *order)


def is_tight(peak_bytes: float, limit_bytes: float) -> bool:
    """Whether the error of the formula is more than the room that is left."""
    return peak_bytes * (1 + MEMORY_ERROR_FRAC) > limit_bytes


def smallest_plan(training: Training, cluster: Cluster) -> Sized | None:
    """The plan that needs the least memory of a rank; None when no plan is legal."""
    plans = _sized_plans(training, cluster, Counter())
    return min(plans, key=lambda each: each.peak_bytes, default=None)


def _sized_plans(training: Training, cluster: Cluster, illegal: Counter[str]) -> Iterator[Sized]:
    """Every legal candidate of a cluster with its memory."""
    choice = training.choice
    for layout in layouts(
        training.config,
        cluster.num_devices,
        cluster.machine.devices_per_domain,
        casts=training.casts,
        trains_all=training.lora is None,
        most_data_ranks=training.documents_of_a_step,
        illegal=illegal,
        mesh=choice.mesh,
    ):
        local = local_config(training.config, layout.tensor)
        multiple = layout.tensor if layout.splits_tokens else 1
        least = row_tokens_for(training.profile.longest, multiple)
        share = training.batch_tokens / layout.num_data_ranks
        for row_tokens in row_choices(least, share, choice.row_tokens):
            work = training.work(layout, row_tokens)
            units = units_for(training, layout, work, local)
            for recompute in choice.recompute:
                saved = _saved(training, local, work, recompute)
                terms = memory_terms(local, work, units, recompute=recompute, saved_per_token=saved)
                candidate = Candidate(layout=layout, recompute=recompute, row_tokens=row_tokens)
                yield Sized(candidate=candidate, work=work, terms=terms)


def units_for(
    training: Training, layout: Layout, work: Workload, local: DecoderConfig | None = None
) -> list[Unit]:
    """The units that a layout gathers and reduces; replicas and split tokens change none."""
    sharding = (layout.is_sharded, layout.keeps_gathered, layout.reduces_always)
    key = (layout.tensor, layout.shard, *sharding)
    found = training.parts.units
    if key not in found:
        data = [spec for spec in layout.specs if spec.family == "data"]
        local = local or local_config(training.config, layout.tensor)
        master = DTYPE_BYTES[training.master_dtype]
        found[key] = units_of(local, work, data, layout.mesh, master)
    return found[key]


def _saved(training: Training, local: DecoderConfig, work: Workload, recompute: str) -> float:
    key = (work.tensor_degree, work.splits_tokens, work.document_tokens, recompute)
    found = training.parts.saved
    if key not in found:
        found[key] = saved_bytes_per_token(local, work, recompute)
    return found[key]


def _groups(training: Training, work: Workload) -> tuple[OperatorGroup, ...]:
    key = (work.tensor_degree, work.splits_tokens, work.document_tokens)
    found = training.parts.groups
    if key not in found:
        found[key] = operator_groups(local_config(training.config, work.tensor_degree), work)
    return found[key]


def priced(training: Training, cluster: Cluster, sized: Sized) -> PricedPlan:
    """A plan with the seconds of its step."""
    layout = sized.candidate.layout
    seconds = step_seconds(
        training.config,
        sized.work,
        _groups(training, sized.work),
        units_for(training, layout, sized.work),
        layout.specs,
        device_rates(cluster.machine),
        mesh=layout.mesh,
        recompute=sized.candidate.recompute,
    )
    return PricedPlan(sized=sized, seconds=seconds)
