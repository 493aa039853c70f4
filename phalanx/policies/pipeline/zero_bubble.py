"""Zero bubble: backward passes in two parts, the weight gradients filling what would be idle."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.policies.pipeline import require_sizes
from phalanx.policy import Order, Step
from phalanx.registry import Source, register

SOURCE = Source(
    title="Zero Bubble Pipeline Parallelism",
    id="arXiv:2401.10241",
    where="section 2, Figures 2 (ZB-H1) and 3 (ZB-H2); Table 1",
)


@register("pipeline", "zero_bubble", grain="stage", source=SOURCE, status="verified")
@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroBubble(Order):
    """1F1B whose backward pass is cut in two: the input gradient (I) goes to the rank before at
    once, the weight gradient (W) waits until the rank would be idle. Rank r lets k r weight
    gradients wait, so the fill and the drain of the pipeline are worked away.

    Symbols: p ranks, r a rank, m micro-batches (see the package); t_f, t_i, t_w seconds of a
    forward pass, an input and a weight gradient of one micro-batch on one rank; k `depth`.
    Warm-up of rank r: min(m, k (p - r) - (k - 1)) forward passes; then input gradient and forward
    pass take turns, each pair followed by a weight gradient once k r of them wait.

    Costs, for equal stages, free transfers and m >= k p - (k - 1):
    - depth 1 (ZB-H1): step time m (t_f + t_i + t_w) + (p - 1)(t_f + t_i - t_w), t_w being the
      shortest; 1F1B has (p - 1)(t_f + t_i + t_w) there;
    - depth 2 (ZB-H2): for t_f = t_i = t_w no rank idles between its first and its last pass; they
      end as staggered as they began, so the step takes (p - 1) t_f more than its work;
    - peak of micro-batches whose activations a rank keeps: min(m, k p - (k - 1)), on every rank:
      that of rank 0 in 1F1B for depth 1, about twice that for depth 2.

    Source: arXiv:2401.10241, section 2, Figures 2 and 3, Table 1.

    Differences and limits: the paper's ZB-H2 lets ranks go on to the next step without meeting in
    the optimizer and validates afterwards; here all ranks end the step together, and the last
    p - 1 forward times stay. Its automatic search over unequal times is left out. A pass in two
    parts costs torch a second walk over the graph; where t_w is small beside that, use 1f1b. Until
    its weight gradient comes, torch also keeps what that is made of, the gradients of the outputs
    of products and norms (`cost.pipeline_memory`), which the paper's count leaves out; and layers
    that are computed again are so in either part, so full recomputation gives away what is won.

    Args:
        depth: k; 1: ZB-H1, the memory of 1F1B; 2: ZB-H2.
    """

    depth: int = field(default=1, metadata={"low": 1, "high": 2})

    def order(self, num_ranks: int, num_items: int) -> list[list[Step]]:
        """The list of each rank; stage and rank are one."""
        require_sizes(num_ranks, num_items)
        return [self._list(rank, num_ranks, num_items) for rank in range(num_ranks)]

    def _list(self, rank: int, num_ranks: int, num_items: int) -> list[Step]:
        num_warmup = min(num_items, self.depth * (num_ranks - rank) - (self.depth - 1))
        num_waiting = self.depth * rank
        steps = [Step(rank, "F", item) for item in range(num_warmup)]
        for item in range(num_items):
            steps.append(Step(rank, "I", item))
            if item >= num_waiting:
                steps.append(Step(rank, "W", item - num_waiting))
            if item + num_warmup < num_items:
                steps.append(Step(rank, "F", item + num_warmup))
        first = max(0, num_items - num_waiting)
        return steps + [Step(rank, "W", item) for item in range(first, num_items)]
