"""1F1B: after a short warm-up, one forward and one backward pass take turns."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from phalanx.policies.pipeline import require_sizes
from phalanx.policy import Order, Step
from phalanx.registry import Source, register

SOURCE = Source(
    title="Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    id="arXiv:2104.04473",
    where="section 2.2.1 (default schedule), Figure 4; the schedule is PipeDream-Flush",
)


@register("pipeline", "1f1b", grain="stage", source=SOURCE, status="verified")
@dataclass(frozen=True, slots=True, kw_only=True)
class OneFOneB(Order):
    """A rank warms up with as many forward passes as there are ranks after it, then alternates
    forward and backward, then drains. Time is GPipe's; activations are given back as early as the
    pipeline allows, so memory does not grow with the number of micro-batches.

    Symbols: p ranks, r a rank, m micro-batches, t_f and t_b seconds per rank and micro-batch (see
    the package). Warm-up of rank r: min(m, p - r - 1) forward passes.

    Costs, for equal stages and free transfers:
    - step time (m + p - 1)(t_f + t_b) seconds, as GPipe;
    - idle fraction of every rank (p - 1) / (m + p - 1); over the ideal time it is (p - 1) / m;
    - peak of micro-batches whose activations rank r keeps: min(m, p - r).

    Source: arXiv:2104.04473, section 2.2.1, Figure 4 (PipeDream-Flush of arXiv:2006.09503).

    Differences and limits: one stage per rank. Megatron-LM fuses the send and the receive of a
    steady pair into one call; here transfers are derived from the list (`lower`), each posted as
    early as its sender allows. Unequal stages or micro-batches make the formulas lower bounds.
    """

    def order(self, num_ranks: int, num_items: int) -> list[list[Step]]:
        """The list of each rank; stage and rank are one."""
        require_sizes(num_ranks, num_items)
        return [_list(stage, num_ranks, num_items) for stage in range(num_ranks)]


def _list(stage: int, num_ranks: int, num_items: int) -> list[Step]:
    num_warmup = min(num_items, num_ranks - stage - 1)
    forward = [Step(stage, "F", item) for item in range(num_items)]
    backward = [Step(stage, "B", item) for item in range(num_items)]
    steady = chain.from_iterable(zip(forward[num_warmup:], backward))
    return [*forward[:num_warmup], *steady, *backward[num_items - num_warmup :]]
