"""GPipe: fill with all forward passes, then drain with all backward passes."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.policies.pipeline import require_sizes
from phalanx.policy import Order, Step
from phalanx.registry import Source, register

SOURCE = Source(
    title="GPipe: Easy Scaling with Micro-Batch Pipeline Parallelism",
    id="arXiv:1811.06965",
    where="section 2.2, Figure 2(c); bubble in section 2.3",
)


@register("pipeline", "gpipe", grain="stage", source=SOURCE, status="verified")
@dataclass(frozen=True, slots=True, kw_only=True)
class GPipe(Order):
    """Each rank runs the forward passes of all micro-batches, then all backward passes. The last
    rank turns at once; the others wait until gradients have come back to them.

    Symbols: p ranks, m micro-batches, t_f and t_b seconds per rank and micro-batch (see the
    package).

    Costs, for equal stages and free transfers:
    - step time (m + p - 1)(t_f + t_b) seconds;
    - idle fraction of every rank (p - 1) / (m + p - 1);
    - peak of micro-batches whose activations rank r keeps: m, on every rank.

    Source: arXiv:1811.06965, section 2.2, Figure 2(c); bubble in section 2.3.

    Differences and limits: backward passes come in the order of the micro-batches, so that
    gradients add up as in a plain accumulation loop; Figure 2(c) draws them in reverse, with the
    same step time and peak. The paper recomputes activations within a stage; here recomputation is
    a decision of the model's, not of the schedule's. Memory grows with m: prefer 1f1b for large m.
    """

    def wanted_items(self, num_ranks: int) -> int:
        """Any number: nothing takes turns."""
        return 1

    def order(self, num_ranks: int, num_items: int) -> list[list[Step]]:
        """The list of each rank; stage and rank are one."""
        require_sizes(num_ranks, num_items)
        return [
            [Step(stage, kind, item) for kind in "FB" for item in range(num_items)]
            for stage in range(num_ranks)
        ]
