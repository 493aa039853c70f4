"""Interleaved 1F1B: several model chunks per rank, rounds of any length, any number of items."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, chain

from phalanx.errors import PlanError
from phalanx.policies.pipeline import require_sizes
from phalanx.policy import Order, Step
from phalanx.registry import Source, register

SOURCE = Source(
    title="Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    id="arXiv:2104.04473",
    where=(
        "section 2.2.2, Figure 4; free rounds: Scaling Llama 3 Training with Efficient "
        "Parallelism Strategies, DOI 10.1145/3695053.3731410, section 3.1"
    ),
)


@register("pipeline", "interleaved", grain="stage", source=SOURCE, status="verified")
@dataclass(frozen=True, slots=True, kw_only=True)
class Interleaved(Order):
    """Each rank holds `virtual` chunks of the model: chunk c of rank r is stage c p + r. Items pass
    in rounds of `per_round`: within a round chunk after chunk, within a chunk item after item;
    backward passes take the same rounds with the chunks reversed. A rank warms up, alternates one
    forward and one backward pass, and drains.

    Symbols: p ranks, r a rank, m micro-batches, t_f and t_b seconds per rank and micro-batch (see
    the package), v chunks of a rank (`virtual`), n items of the longest round.
    Warm-up of rank r: min(m v, (v - 1) n + 2 (p - r - 1)) passes of a chunk.

    Costs, for equal stages, free transfers, p <= n and p <= m:
    - step time (m + (p - 1) / v)(t_f + t_b) seconds;
    - idle over the ideal time (p - 1) / (m v), v times less than 1F1B;
    - peak of chunks of micro-batches whose activations rank r keeps: warm-up + 1, at most m v;
    - messages: v times those of 1F1B.
    A longer round (n > p) gives each message n - p passes of slack, for (n - p)(v - 1) more chunks
    in memory. A round shorter than p leaves ranks without input, so then all forward passes come
    first, and all backward passes after them.

    Source: arXiv:2104.04473, section 2.2.2, Figure 4; rounds of any length and any number of
    micro-batches: DOI 10.1145/3695053.3731410, section 3.1, whose formula of the warm-up is
    misprinted; this is the one that its schedules have.

    Differences and limits: a last round shorter than p would leave ranks without input, and can
    stop them for ever; Megatron-LM refuses it, here its items join the rounds before it, which may
    grow beyond `per_round`. With v = 1 the warm-up is longer than that of 1f1b (2 (p - r - 1)): use
    1f1b. Transfers are derived from the list (`lower`).

    Args:
        virtual: v, chunks of a rank.
        per_round: items that pass a chunk before the next chunk; 0: as many as ranks.
    """

    virtual: int = field(default=2, metadata={"low": 1})
    per_round: int = field(default=0, metadata={"low": 0})

    def num_stages(self, num_ranks: int) -> int:
        """v on each rank."""
        return self.virtual * num_ranks

    def wanted_items(self, num_ranks: int) -> int:
        """One for each rank; any number where all forward passes come first anyway."""
        return num_ranks if self._takes_turns(num_ranks) else 1

    def order(self, num_ranks: int, num_items: int) -> list[list[Step]]:
        """The list of each rank.

        Raises:
            PlanError: `order/illegal` for less than one rank, item or chunk.
        """
        require_sizes(num_ranks, num_items)
        if self.virtual < 1 or self.per_round < 0:
            name = "virtual" if self.virtual < 1 else "per_round"
            low = 1 if self.virtual < 1 else 0
            rule = f"must be at least {low}"
            raise PlanError("order/illegal", name, getattr(self, name), rule, legal=[low])
        return [self._list(rank, num_ranks, num_items) for rank in range(num_ranks)]

    def num_warmup(self, rank: int, num_ranks: int, num_items: int) -> int:
        """Forward passes of a chunk before the first backward pass."""
        passes = num_items * self.virtual
        if not self._takes_turns(num_ranks):
            return passes
        longest = max(map(len, self.rounds(num_ranks, num_items)))
        return min(passes, (self.virtual - 1) * longest + 2 * (num_ranks - rank - 1))

    def _takes_turns(self, num_ranks: int) -> bool:
        return (self.per_round or num_ranks) >= num_ranks

    def rounds(self, num_ranks: int, num_items: int) -> list[range]:
        """The items of each round."""
        length = self.per_round or num_ranks
        whole, rest = divmod(num_items, length)
        sizes = [length] * whole
        if rest and (rest >= num_ranks or length < num_ranks or not whole):
            sizes.append(rest)
        else:
            sizes = [size + rest // whole + (at < rest % whole) for at, size in enumerate(sizes)]
        ends = list(accumulate(sizes))
        return [range(end - size, end) for end, size in zip(ends, sizes)]

    def _list(self, rank: int, num_ranks: int, num_items: int) -> list[Step]:
        rounds = self.rounds(num_ranks, num_items)
        chunks = [chunk * num_ranks + rank for chunk in range(self.virtual)]
        forward = [Step(c, "F", item) for items in rounds for c in chunks for item in items]
        backward = [Step(c, "B", item) for items in rounds for c in chunks[::-1] for item in items]
        num_warmup = self.num_warmup(rank, num_ranks, num_items)
        steady = chain.from_iterable(zip(forward[num_warmup:], backward))
        return [*forward[:num_warmup], *steady, *backward[len(forward) - num_warmup :]]
