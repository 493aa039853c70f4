"""DualPipeV: two chunks per rank in a V; in the middle every forward has a backward beside it."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import PlanError
from phalanx.policies.pipeline import TwoChunks, require_sizes, zigzag
from phalanx.policy import Order, Step
from phalanx.registry import Source, register

SOURCE = Source(
    title="DeepSeek-V3 Technical Report",
    id="arXiv:2412.19437",
    where="section 3.2.1 (DualPipe); the V-shaped half of it: github.com/deepseek-ai/DualPipe",
)


@register("pipeline", "dualpipe_v", grain="stage", source=SOURCE)
@dataclass(frozen=True, slots=True, kw_only=True)
class DualPipeV(Order):
    """DualPipe cut in half: instead of two opposite pipelines with two copies of the weights, rank
    r holds chunk 0 (stage r) and chunk 1 (stage 2p - 1 - r) of one. In the middle a forward pass
    of one chunk comes with a whole backward pass of the other; only fill and drain use backward
    passes in two parts.

    Symbols: p ranks, r a rank, m micro-batches (see the package); F, B, W seconds of a forward
    pass, a whole backward pass and its weight gradient for one chunk.

    Costs, for equal stages and free transfers:
    - step time 2 m (F + B) + (p - 1) F for B = 2 F = 2 W. The authors give the idle time as
      (p - 1)(F&B + B - 3 W), F&B being the time of a forward and a backward pass that overlap;
    - peak of chunks of micro-batches whose activations a rank keeps: 2p + 1, on every rank;
    - messages: 2 (p - 1) per micro-batch and direction; the turn sends nothing.

    Source: arXiv:2412.19437, section 3.2.1, Table 2; DualPipeV: github.com/deepseek-ai/DualPipe.

    Differences and limits: its point is that a forward and a backward pass run at the same time,
    the communication of one behind the computes of the other, operator by operator. Here the two
    are one after the other, forward first, as torch's runtime executes them too: memory and order
    are the paper's, the overlap is not. Needs m >= 2p.
    """

    def num_stages(self, num_ranks: int) -> int:
        """Two on each rank."""
        return 2 * num_ranks

    def rank_of_stage(self, num_ranks: int) -> tuple[int, ...]:
        """Down the ranks and back up."""
        return zigzag(num_ranks, 2)

    def least_items(self, num_ranks: int) -> int:
        """Two per rank: the fill takes as many."""
        return 2 * num_ranks

    def order(self, num_ranks: int, num_items: int) -> list[list[Step]]:
        """The list of each rank.

        Raises:
            PlanError: `order/illegal` for fewer micro-batches than stages.
        """
        require_sizes(num_ranks, num_items)
        least = self.least_items(num_ranks)
        if num_items < least:
            rule = f"dualpipe_v needs two micro-batches per rank, and there are {num_ranks} ranks"
            raise PlanError("order/illegal", "num_items", num_items, rule, legal=[least])
        return [_list(rank, num_ranks, num_items) for rank in range(num_ranks)]


def _list(rank: int, num_ranks: int, num_items: int) -> list[Step]:
    behind = num_ranks - rank - 1
    chunks = TwoChunks(rank, num_ranks)
    chunks.write("F0", 2 * behind)
    chunks.write("F0 F1", rank + 1)
    chunks.write("I1 W F1", behind)
    chunks.write("F0 B1 F1 B0", num_items - num_ranks - behind)
    chunks.write("B1 F1 B0", behind)
    whole = (rank + 1) // 2  # of the passes of the drain; the others are in two parts
    chunks.write("B1 B0", whole)
    if rank % 2 == 0:
        chunks.write("B1 I0")
    chunks.write("I1 I0", rank // 2 if rank % 2 == 0 else rank + 1 - whole)
    chunks.write("W I0", behind)
    chunks.write("W", rank + 1)
    return chunks.steps
