"""What is known of plans once they are priced, and what a cluster can do for a job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from phalanx.cost.training_plans import RECOMPUTE
from phalanx.cost.training_step import StepTimes
from phalanx.planner.clusters import AskedCluster
from phalanx.planner.runnable import Layout, layout_of
from phalanx.planner.training import Training
from phalanx.planner.words import plan_words

LINKS = ("tensor", "context", "expert", "pipeline", "data")


@dataclass(frozen=True, kw_only=True)
class SizedPlan:
    """A plan with its memory.

    Attributes:
        row: columns of `TrainingPlans`.
        row_limit: tokens of its longest micro-batch.
        terms: name -> bytes of the fullest rank.
        high_bytes: of the 90 % bar of their sum.
        host_bytes: of a rank's states in host memory.
        missing: what `phalanx train` does not do yet of what it asks for.
    """

    row: Mapping[str, float]
    row_limit: int
    terms: Mapping[str, float]
    high_bytes: float
    host_bytes: float
    missing: tuple[str, ...]

    @property
    def peak_bytes(self) -> float:
        """Of the fullest rank."""
        return sum(self.terms.values())

    @property
    def largest_term(self) -> str:
        """What memory is needed for most."""
        return max(self.terms, key=lambda name: self.terms[name])

    @property
    def recompute(self) -> str:
        """By name."""
        return RECOMPUTE[int(self.row["recompute"])]

    def layout(self, training: Training) -> Layout:
        """Of a plan that `phalanx train` runs."""
        trains_all = training.method != "lora"
        return layout_of(self.row, casts=training.casts, trains_all=trains_all)

    def describe(self) -> str:
        """In a line."""
        return plan_words(self.row, self.row_limit)


@dataclass(frozen=True, kw_only=True)
class PricedPlan:
    """A plan with its memory and its time.

    Attributes:
        parts: what a step is spent on -> seconds.
        low_s, high_s: of the 90 % bar of their sum.
    """

    sized: SizedPlan
    parts: Mapping[str, float]
    low_s: float
    high_s: float

    @property
    def total_s(self) -> float:
        """The step."""
        return sum(self.parts.values())

    @property
    def is_runnable(self) -> bool:
        """Whether `phalanx train` runs it."""
        return not self.sized.missing

    def shares(self) -> dict[str, float]:
        """What the step is spent on, as shares that sum to 1; links together."""
        found: dict[str, float] = {}
        for name, seconds in self.parts.items():
            group = "links" if name in LINKS else "compute" if name == "head" else name
            found[group] = found.get(group, 0.0) + seconds / self.total_s
        return found


def priced_plan(sized: SizedPlan, times: StepTimes, index: int) -> PricedPlan:
    """A plan with its row of a table of times."""
    return PricedPlan(
        sized=sized,
        parts={name: float(column[index]) for name, column in times.parts.items()},
        low_s=float(times.low_s[index]),
        high_s=float(times.high_s[index]),
    )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a cluster can do for a training job.

    Attributes:
        source: where the efficiencies come from.
        limit_bytes: what a rank may fill.
        limit_s, budget_usd: of the whole job (0: none).
        ranked: all plans that fit, best first, unproven schedules left out.
        best: the plan to take; None when none fits.
        fastest: the one that the formula ranks first; another one where `best` cannot be told
            apart from it and runs.
        unproven: a faster one whose schedule no published run stands behind.
        runnable: the best one that `phalanx train` runs; None when none fits.
        smallest: the plan that needs the least memory, states in host memory left aside; None when
            there is no legal plan.
        num_plans, num_fit: legal plans that were priced, and those that fit.
        num_listed: plans that these were chosen from, where there were too many; 0: they are all.
        num_alike: of these, plans whose bar holds the fastest one, and which its bar holds.
        unlimited_s: seconds of the fastest step if memory had no limit.
        illegal: reason -> layouts that cannot exist.
    """

    asked: AskedCluster
    training: Training
    source: str
    limit_bytes: float
    limit_s: float
    budget_usd: float
    ranked: Iterable[PricedPlan]
    best: PricedPlan | None
    fastest: PricedPlan | None
    runnable: PricedPlan | None
    unproven: PricedPlan | None
    smallest: SizedPlan | None
    num_plans: int
    num_listed: int
    num_fit: int
    num_alike: int
    unlimited_s: float
    illegal: Mapping[str, int]

    @property
    def fits(self) -> bool:
        """Whether the best plan stays within memory, and is expected to within time and budget."""
        return self.best is not None and not self.is_too_slow and not self.is_too_dear

    @property
    def is_too_slow(self) -> bool:
        """Whether the best plan is expected to take longer than the job may."""
        return self.best is not None and 0 < self.limit_s < 3600 * self.hours[0]

    @property
    def is_too_dear(self) -> bool:
        """Whether it is expected to cost more than the budget."""
        return self.best is not None and 0 < self.budget_usd < self.dollars[0]

    @property
    def verdict(self) -> str:
        """fits, tight (the bar of its memory crosses the limit), too slow, too dear, no price (to
        compare with a budget), does not fit, no legal plan."""
        if self.best is None:
            return "does not fit" if self.smallest else "no legal plan"
        if self.is_too_slow:
            return "too slow"
        if self.is_too_dear:
            return "too dear" if self.dollars[0] < inf else "no price"
        return "tight" if is_tight(self.best.sized, self.limit_bytes) else "fits"

    @property
    def step_s(self) -> tuple[float, float, float]:
        """(expected, least, most) of a step; a plan that fits is needed."""
        assert self.best is not None
        return self.best.total_s, self.best.low_s, self.best.high_s

    @property
    def hours(self) -> tuple[float, float, float]:
        """(expected, least, most) of the whole job."""
        expected, least, most = (s * self.training.num_steps / 3600 for s in self.step_s)
        return expected, least, most

    @property
    def dollars(self) -> tuple[float, float, float]:
        """(expected, least, most) at the price of the machine's file; infinite without one."""
        rate = self.asked.cluster.machine.usd_per_h * self.asked.cluster.num_devices
        expected, least, most = (hours * rate for hours in self.hours)
        return expected, least, most

    @property
    def bound(self) -> tuple[str, float]:
        """What most of the step is spent on, and its share."""
        assert self.best is not None
        shares = self.best.shares()
        name = max(shares, key=lambda each: shares[each])
        return name, shares[name]

    @property
    def memory_gain(self) -> float:
        """Share of the step that devices of any memory would save."""
        if self.fastest is None:
            return 0.0
        return max(0.0, 1.0 - self.unlimited_s / self.fastest.total_s)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        table: dict[str, Any] = {
            "cluster": str(self.asked.cluster),
            "asked": self.asked.text,
            "note": self.asked.note,
            "fits": self.fits,
            "verdict": self.verdict,
            "usable_bytes": self.limit_bytes,
            "plans": self.num_plans,
            "plans_before_pruning": self.num_listed or self.num_plans,
            "plans_that_fit": self.num_fit,
            "indistinguishable": self.num_alike,
            "illegal": dict(self.illegal),
            "efficiency": self.source,
        }
        sized = self.best.sized if self.best else self.smallest
        if sized is not None:
            table |= {"peak_bytes": sized.peak_bytes, "most_bytes": sized.high_bytes}
            table |= {"memory": dict(sized.terms), "host_state_bytes": sized.host_bytes}
            table["plan"] = self._plan_table(sized)
        if self.best is not None:
            names = ("expected", "least", "most")
            table["step_s"] = dict(zip(names, self.step_s))
            table["hours"] = dict(zip(names, self.hours))
            priced = self.asked.cluster.machine.price is not None
            table["dollars"] = dict(zip(names, self.dollars)) if priced else None
            table["seconds"] = dict(self.best.parts)
            table["shares"] = self.best.shares()
            table["faster_without_memory_limit"] = self.memory_gain
        others = {"fastest": self.fastest, "runnable": self.runnable, "unproven": self.unproven}
        for name, other in others.items():
            if other is not None and other is not self.best:
                table[name] = self._plan_table(other.sized) | {"step_s": other.total_s}
        return table

    def _plan_table(self, sized: SizedPlan) -> dict[str, Any]:
        table: dict[str, Any] = {
            "columns": dict(sized.row),
            "row_limit": sized.row_limit,
            "words": sized.describe(),
            "simulated_only": list(sized.missing),
        }
        if not sized.missing:
            layout = sized.layout(self.training)
            table |= {"mesh": layout.mesh.to_dict(), "specs": layout.tables()}
            table |= {"order": dict(layout.schedule or {})}
            table |= {"row_tokens": sized.row_limit, "recompute": sized.recompute}
        return table


def is_tight(sized: SizedPlan, limit_bytes: float) -> bool:
    """Whether the bar of its memory crosses the limit."""
    return sized.high_bytes > limit_bytes
