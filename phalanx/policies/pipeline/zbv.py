"""ZB-V: two chunks per rank in a V, backward passes in two parts, no idle time in the middle."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.policies.pipeline import TwoChunks, require_sizes, zigzag
from phalanx.policy import Order, Step
from phalanx.registry import Source, register

SOURCE = Source(
    title="Pipeline Parallelism with Controllable Memory",
    id="arXiv:2405.15362",
    where="section 3; ZB-V of arXiv:2401.10241, section 6, Figure 6",
)


@register("pipeline", "zbv", grain="stage", source=SOURCE, status="verified")
@dataclass(frozen=True, slots=True, kw_only=True)
class ZBV(Order):
    """Rank r holds chunk 0 (stage r) and chunk 1 (stage 2p - 1 - r): micro-batches walk down the
    ranks and back up, so rank 0 has both the first and the last stage and backward passes begin
    early. Weight gradients are put off only where the drain leaves time for them.

    Symbols: p ranks, r a rank, m micro-batches (see the package); t seconds of one forward pass,
    input gradient or weight gradient of one chunk, all alike.

    Costs, for equal times, free transfers and m >= 2p - 1:
    - rank r idles r t before its first pass and (p - 1 - r) t after its last, never between: the
      step takes 6 m t + (p - 1) t seconds;
    - peak of chunks of micro-batches whose activations a rank keeps: 2p on every rank, the bytes
      of p whole micro-batches, as rank 0 in 1F1B;
    - messages: 2 (p - 1) per micro-batch and direction; the turn sends nothing.

    Source: arXiv:2401.10241, section 6 (ZB-V); arXiv:2405.15362, section 3.

    Differences and limits: this is the paper's list for equal times; its search over measured
    times is left out, and unequal times open gaps. Gradients that wait for their weight pass come
    on top of the peak, as in zero_bubble. With m < 2p - 1 it is the list of 2p - 1 micro-batches
    without those that are not there, which idles more.
    """

    def num_stages(self, num_ranks: int) -> int:
        """Two on each rank."""
        return 2 * num_ranks

    def rank_of_stage(self, num_ranks: int) -> tuple[int, ...]:
        """Down the ranks and back up."""
        return zigzag(num_ranks, 2)

    def order(self, num_ranks: int, num_items: int) -> list[list[Step]]:
        """The list of each rank."""
        require_sizes(num_ranks, num_items)
        return [
            [step for step in _list(rank, num_ranks, num_items) if step.item < num_items]
            for rank in range(num_ranks)
        ]


def _list(rank: int, num_ranks: int, num_items: int) -> list[Step]:
    """The list for as many micro-batches as fill the pipeline, at least."""
    num_items = max(num_items, 2 * num_ranks - 1)
    above = num_ranks - rank  # this rank and those behind it on the way down
    chunks = TwoChunks(rank, num_ranks)
    chunks.write("F0", 2 * above - 1)
    chunks.write("F1 F0", rank)
    chunks.write("F1 I1 W1", above)
    chunks.write("F0 I0 W0 F1 I1 W1", num_items - chunks.num_done("F0"))
    chunks.write("I0 W0 F1 I1 W1", num_items - chunks.num_done("F1"))
    chunks.write("I0 I1", rank)
    chunks.write("I0 W0", above)
    chunks.write("W1", chunks.num_waiting(1))
    chunks.write("W0", chunks.num_waiting(0))
    return chunks.steps
