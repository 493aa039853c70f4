"""How many devices of a kind meet a deadline and a budget, and what the fewest of them cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, inf, log2
from typing import Any

from phalanx.hardware import Cluster
from phalanx.planner.answers import Answer
from phalanx.planner.clusters import AskedCluster
from phalanx.planner.search import answer
from phalanx.planner.sized import limit_of

_MOST_DEVICES = 1 << 17
_TRIED = 6  # sizes, each twice the one before


@dataclass(frozen=True)
class Size:
    """The least number of devices of a kind that meets the limits.

    Attributes:
        asked: the answer for the cluster that was named.
        found: for the fewest devices, of 1, 2, 4, ...; None where no number does.
        why_not: what stands against it, in words.
    """

    asked: Answer
    found: Answer | None
    why_not: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "machine": self.asked.asked.cluster.machine.name,
            "found": self.found.to_dict() if self.found else None,
            "why_not": self.why_not,
        }


def smallest_size(
    asked: Answer,
    *,
    limit_s: float = 0.0,
    budget_usd: float = 0.0,
    **options: Any,
) -> Size:
    """The fewest devices of the same kind that meet all limits.

    The first size that meets them all, of those doubled from the least that weights and FLOPs ask
    for: more devices never use their time better, so it is about the cheapest that is fast enough.
    Tuning is what `phalanx train` runs, if it knows the model; pretraining may be simulated only.

    Args:
        options: of `planner.search.answer`.
    """
    training, machine = asked.training, asked.asked.cluster.machine
    if asked.asked.mixed is not None:
        kinds = dict.fromkeys(each.machine.name for each in asked.asked.mixed.parts)
        alone = ",".join(f"8x{name}" for name in kinds)
        return Size(asked, None, f"devices of several kinds or sites; of each alone: --on {alone}")
    options |= {"must_run": training.config is not None and training.method != "pretrain"}
    fast_enough: list[Answer] = []
    numbers = list(_numbers(asked, limit_s))
    tried = ", ".join(f"{number:,}" for number in numbers)
    for number in numbers:
        cluster = Cluster(machine, number)
        where = AskedCluster(str(cluster), cluster)
        found = answer(training, where, limit_s=limit_s, budget_usd=budget_usd, **options)
        if found.verdict == "fits":
            return Size(asked, found)
        if found.is_too_dear and not found.is_too_slow:
            fast_enough.append(found)
    if not fast_enough:
        return Size(asked, None, f"none of {tried} devices is fast enough and fits")
    cheapest = min(fast_enough, key=lambda each: each.dollars[0])
    usd = cheapest.dollars[0]
    text = f"{cheapest.asked.text} is the cheapest that is fast enough and costs ${usd:,.0f}"
    return Size(asked, None, "no price is known" if usd == inf else text)


def _numbers(asked: Answer, limit_s: float) -> Iterator[int]:
    """Powers of two, from what weights and FLOPs need at the very least."""
    training, cluster = asked.training, asked.asked.cluster
    least = 2.0 * training.shape.num_params / limit_of(cluster, 0.0)
    if limit_s:
        least = max(least, training.least_device_s(cluster.machine) / limit_s)
    first = max(0, ceil(log2(least)))
    for exponent in range(first, first + _TRIED):
        if 1 << exponent <= _MOST_DEVICES:
            yield 1 << exponent
