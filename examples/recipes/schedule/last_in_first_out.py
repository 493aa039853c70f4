"""A pipeline schedule: GPipe whose backward passes start with the newest micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.policy import Order, Step
from phalanx.registry import Source, register


@register(
    "pipeline", "last-in-first-out", grain="stage", source=Source("a recipe of Phalanx", "none")
)
@dataclass(frozen=True, kw_only=True)
class LastInFirstOut(Order):
    """Runs all forward passes, then the backward passes in reverse order.

    Symbols: p ranks, m micro-batches, t_f and t_b seconds of a forward and a backward pass.
    Costs: step time (m + p - 1)(t_f + t_b), as GPipe; m micro-batches are kept at the peak.
    Source: none, it is a recipe; the forward half is GPipe's (arXiv 1811.06965).
    Differences and limits: one stage per rank.
    """

    def order(self, num_ranks: int, num_items: int) -> list[list[Step]]:
        """The same list on every rank, with the rank's own stage."""
        items = range(num_items)
        return [
            [Step(rank, "F", item) for item in items]
            + [Step(rank, "B", item) for item in reversed(items)]
            for rank in range(num_ranks)
        ]
