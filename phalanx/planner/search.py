"""Which plan of a cluster is best for a training job: all legal ones are priced, and ranked.

Memory is `cost.training_memory`, seconds are `cost.training_step`; both know how far they may be
off. Pipelines among the best are played as events (`planner.refined`). Plans within each other's
bars cannot be told apart: of these, one that `phalanx train` runs is preferred, and of plans that
take the same time but for `SAME_TIME_FRAC` the one with the fewest axes. Schedules without a
published run are told beside, never taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from phalanx.cost.training_plans import SCHEDULES
from phalanx.cost.training_step import StepTimes, training_step
from phalanx.planner.answers import Answer, PricedPlan, priced_plan
from phalanx.planner.clusters import AskedCluster
from phalanx.planner.columns import Table
from phalanx.planner.cuts import cut_of
from phalanx.planner.refined import PLAYED, refine
from phalanx.planner.sized import SizedPlans, limit_of, sized_plans
from phalanx.planner.training import Training

# a plan whose memory may not suffice is taken where all others take more than twice its time
TIGHT_COSTS = 2.0
NUM_PLAYED = 8  # pipelines
# assumption: no formula here ranks plans more closely (docs/accuracy.md: regret of first choices)
SAME_TIME_FRAC = 0.03
# of which the published tables hold runs; the others are priced by formula alone
PROVEN_SCHEDULES = ("1f1b", "interleaved")


def answer(
    training: Training,
    asked: AskedCluster,
    *,
    minimise: str = "time",
    limit_bytes: float = 0.0,
    limit_s: float = 0.0,
    budget_usd: float = 0.0,
    must_run: bool = False,
) -> Answer:
    """Price every legal plan of a cluster.

    Args:
        minimise: "time", "cost" (the same on one cluster) or "memory".
        limit_bytes: of a rank (0: what the device leaves).
        limit_s, budget_usd: of the whole job (0: none).
        must_run: only what `phalanx train` runs may be taken.
    """
    cluster = asked.cluster
    limit = limit_of(cluster, limit_bytes)
    sized = sized_plans(training, cluster, limit)
    times = training_step(training.shape, sized.plans, cluster.machine)
    may_take = sized.runnable() if must_run else np.ones(len(sized), dtype=bool)
    allowed = may_take & (sized.memory.peak_bytes <= limit)
    found = _Ranked(sized, times, allowed, limit, minimise)
    if found.fastest is not None and found.fastest.sized.row["pipeline"] > 1:
        times = _played(training, sized, times, found.top[found.is_alike])
        found = _Ranked(sized, times, allowed, limit, minimise)
    return Answer(
        asked=asked,
        training=training,
        source=times.describe(),
        limit_bytes=limit,
        limit_s=limit_s,
        budget_usd=budget_usd,
        ranked=found,
        best=found.best,
        fastest=found.fastest,
        runnable=found.runnable,
        unproven=found.unproven,
        smallest=sized.smallest(sized.table["offload"] == 0),
        num_plans=len(sized),
        num_listed=sized.num_listed,
        num_fit=len(found.order),
        num_alike=int(found.is_alike.sum()),
        unlimited_s=float(times.total_s[_is_proven(sized.table)].min(initial=np.inf)),
        illegal=dict(sized.illegal),
    )


def _played(
    training: Training, sized: SizedPlans, times: StepTimes, order: np.ndarray
) -> StepTimes:
    """Times in which the best pipelines are those of a played schedule, not of a closed form.

    Args:
        order: plans that cannot be told apart, best first.
    """
    schedules = [SCHEDULES.index(name) for name in PLAYED]
    table = sized.table
    can = (table["pipeline"][order] > 1) & np.isin(table["schedule"][order], schedules)
    at = order[can][:NUM_PLAYED]
    if not len(at):
        return times
    some = _rows(times, at)
    shape = training.shape
    cut = cut_of(training.config, training.lora, training.software, shape.num_layers)
    refined = refine(shape, sized.plans.take(at), some, cut)
    scale = refined.total_s / some.total_s
    total_s, low_s, high_s = times.total_s.copy(), times.low_s.copy(), times.high_s.copy()
    total_s[at], low_s[at], high_s[at] = refined.total_s, low_s[at] * scale, high_s[at] * scale
    parts = {name: column.copy() for name, column in times.parts.items()}
    for name, seconds in refined.parts.items():
        parts[name][at] = seconds
    return replace(times, parts=parts, total_s=total_s, low_s=low_s, high_s=high_s)


def _rows(times: StepTimes, at: np.ndarray) -> StepTimes:
    parts = {name: column[at] for name, column in times.parts.items()}
    return replace(
        times,
        parts=parts,
        total_s=times.total_s[at],
        low_s=times.low_s[at],
        high_s=times.high_s[at],
    )


class _Ranked:
    """Plans in the order of an objective."""

    def __init__(
        self,
        sized: SizedPlans,
        times: StepTimes,
        allowed: np.ndarray,
        limit_bytes: float,
        minimise: str,
    ) -> None:
        self._sized, self._times = sized, times
        self._named: dict[int, PricedPlan] = {}
        peak, seconds = sized.memory.peak_bytes, times.total_s
        at = np.flatnonzero(allowed)
        is_tight = sized.memory.high_bytes > limit_bytes
        if minimise == "memory":
            order = np.lexsort((seconds[at], peak[at]))
        else:
            order = np.lexsort((peak[at], seconds[at] * np.where(is_tight[at], TIGHT_COSTS, 1.0)))
        self.order = at[order]
        proven = self.order[_is_proven(sized.table)[self.order]]
        self.top = proven if len(proven) else self.order
        self.is_alike = self._alike(is_tight)
        by_time = minimise != "memory"
        runs = sized.runnable()[self.top]
        first_runs = int(runs.argmax()) if runs.any() else -1
        takes_it = first_runs >= 0 and self.is_alike[first_runs] and by_time
        self.fastest = self._at(self.top[:1])
        self.runnable = self._at(self._simplest(runs, is_tight) if by_time else self.top[runs])
        every = np.ones(len(self.top), dtype=bool)
        taken = self._simplest(every, is_tight) if by_time else self.top
        self.best = self.runnable if takes_it else self._at(taken)
        is_other = len(self.order) > 0 and self.order[0] != self.top[0]
        self.unproven = self._at(self.order[:1]) if is_other else None

    def _alike(self, is_tight: np.ndarray) -> np.ndarray:
        """Of the top plans in order: whether the first one lies in their bar and they in its bar,
        and whether there is room for both or for neither."""
        if not len(self.top):
            return np.zeros(0, dtype=bool)
        times, at, first = self._times, self.top, self.top[0]
        within = (times.total_s[at] <= times.high_s[first]) & (
            times.low_s[at] <= times.total_s[first]
        )
        return within & (is_tight[at] == is_tight[first])

    def _simplest(self, may_be: np.ndarray, is_tight: np.ndarray) -> np.ndarray:
        """Of the first of some top plans and those that take the same time and room, the one with
        the fewest axes; () for none."""
        at = self.top[may_be]
        if not len(at):
            return at
        seconds = self._times.total_s[at]
        same = (seconds <= (1 + SAME_TIME_FRAC) * seconds[0]) & (is_tight[at] == is_tight[at[0]])
        at = at[same]
        return at[np.argsort(_num_axes(self._sized.table)[at], kind="stable")[:1]]

    def __iter__(self) -> Iterator[PricedPlan]:
        """The top plans, best first."""
        for at in range(len(self.top)):
            yield priced_plan(self._sized.at(int(self.top[at])), self._times, int(self.top[at]))

    def _at(self, indices: np.ndarray) -> PricedPlan | None:
        """The first of these plans; the same object wherever it is named."""
        if not len(indices):
            return None
        index = int(indices[0])
        if index not in self._named:
            self._named[index] = priced_plan(self._sized.at(index), self._times, index)
        return self._named[index]


def _num_axes(table: Table) -> np.ndarray:
    """What a plan asks of a reader: axes beside that of the rows, and chunks of a pipeline."""
    names = ("tensor", "pipeline", "context", "expert", "virtual")
    return np.sum([table[name] > 1 for name in names], axis=0)


def _is_proven(table: Table) -> np.ndarray:
    """Whether published runs of a plan's schedule stand behind the formula."""
    known = [SCHEDULES.index(name) for name in PROVEN_SCHEDULES]
    return (table["pipeline"] == 1) | np.isin(table["schedule"], known)
