"""The largest context, or the largest micro-batch, that a cluster has memory for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phalanx.planner.answers import Answer, SizedPlan
from phalanx.planner.models import UNKNOWN_POSITIONS
from phalanx.planner.sized import SizedPlans, sized_plans
from phalanx.planner.training import Training

_FIRST = (1024, 512, 256, 128)  # what is tried until something fits, and doubled from there
_PARTS = 8  # of a doubling, in which the limit is told


@dataclass(frozen=True)
class Largest:
    """What was found, on all plans and on those that `phalanx train` runs.

    Attributes:
        what: "context" or "micro-batch".
        tokens, plan: the largest with the plan that needs the least memory for it; 0 and None.
        runnable_tokens, runnable_plan: the same of what `phalanx train` runs.
        note: what limits the answer other than memory.
    """

    what: str
    asked: Answer
    tokens: int
    plan: SizedPlan | None
    runnable_tokens: int
    runnable_plan: SizedPlan | None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "what": self.what,
            "cluster": str(self.asked.asked.cluster),
            "tokens": self.tokens,
            "plan": self.plan.describe() if self.plan else None,
            "runnable_tokens": self.runnable_tokens,
            "runnable_plan": self.runnable_plan.describe() if self.runnable_plan else None,
            "note": self.note,
        }


def largest_of(what: str, asked: Answer, most_tokens: int = 0) -> Largest:
    """The largest of its kind that fits the limit of a cluster's answer.

    Args:
        most_tokens: positions that the model was made for; 0: not known.
    """
    found = _micro_batch(asked) if what == "micro-batch" else _context(asked, most_tokens)
    if found.runnable_tokens == found.tokens:  # of two plans for it, the one that runs
        return replace(found, plan=found.runnable_plan)
    return found


def _micro_batch(asked: Answer) -> Largest:
    """Of all plans that fit."""
    plans = sized_plans(asked.training, asked.asked.cluster, asked.limit_bytes)
    found: list[tuple[int, SizedPlan | None]] = []
    for mask in (np.ones(len(plans), dtype=bool), plans.runnable()):
        at = np.flatnonzero(mask & (plans.memory.peak_bytes <= asked.limit_bytes))
        limits = plans.table["row_limit"][at]
        if not len(at):
            found.append((0, None))
            continue
        most = int(limits.max())
        of_most = at[limits == most]
        least = of_most[plans.memory.peak_bytes[of_most].argmin()]
        found.append((most, plans.at(int(least))))
    note = "no more than a rank's share of the batch, and 65,536 tokens unless a row is longer"
    return Largest("micro-batch", asked, *found[0], *found[1], note)


def _context(asked: Answer, most_tokens: int) -> Largest:
    """Rows doubled until nothing fits, then the last doubling in parts."""
    most = most_tokens or UNKNOWN_POSITIONS
    (tokens, plan), (run_tokens, run_plan) = (
        _longest(asked, most, only_runnable=only) for only in (False, True)
    )
    is_limit = tokens == most < UNKNOWN_POSITIONS
    note = f"the model has positions for {most:,} tokens" if is_limit else ""
    if tokens and not most_tokens:
        note = "how many positions the model was made for is not known here"
    return Largest("context", asked, tokens, plan, run_tokens, run_plan, note)


def _longest(asked: Answer, most: int, *, only_runnable: bool) -> tuple[int, SizedPlan | None]:
    best: tuple[int, SizedPlan | None] = (0, None)
    seq = next(
        (
            seq
            for seq in (min(each, most) for each in _FIRST)
            if _fitting(asked, seq, only_runnable=only_runnable) is not None
        ),
        most + 1,
    )
    while seq <= most:
        plan = _fitting(asked, seq, only_runnable=only_runnable)
        if plan is None:
            break
        best, seq = (seq, plan), 2 * seq
    reached, _ = best
    step = reached // _PARTS
    for part in range(_PARTS - 1, 0, -1):
        seq = reached + part * step
        if 0 < reached < seq <= most:
            plan = _fitting(asked, seq, only_runnable=only_runnable)
            if plan is not None:
                return seq, plan
    return best


def _fitting(asked: Answer, seq_tokens: int, *, only_runnable: bool) -> SizedPlan | None:
    """The smallest plan of rows of this length, if it fits; a row for every device at least."""
    cluster = asked.asked.cluster
    plans = _with_rows(asked.training, seq_tokens, cluster.num_devices, asked)
    peak = plans.memory.peak_bytes
    if only_runnable:
        peak = np.where(plans.runnable(), peak, np.inf)
    if not len(plans) or peak.min() > asked.limit_bytes:
        return None
    return plans.at(int(peak.argmin()))


def _with_rows(training: Training, seq_tokens: int, least_rows: int, asked: Answer) -> SizedPlans:
    rows = max(training.batch_tokens // seq_tokens, 1)
    rows = -(-max(rows, least_rows) // least_rows) * least_rows
    changed = replace(
        training,
        profile=None,
        seq_tokens=seq_tokens,
        batch_tokens=rows * seq_tokens,
        choice=replace(training.choice, row_tokens=0),
    )
    return sized_plans(changed, asked.asked.cluster, asked.limit_bytes)
