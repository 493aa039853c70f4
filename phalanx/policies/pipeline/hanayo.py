"""Hanayo: micro-batches walk down the ranks and back up, several times; thin stages, one copy."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from phalanx.policies.pipeline import require_sizes, zigzag
from phalanx.policy import Order, Step
from phalanx.registry import Source, register

SOURCE = Source(
    title="Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training "
    "Efficiency",
    id="arXiv:2308.15762",
    where="section 3, Figures 5 and 6; Figure 2 for the costs",
)
_TICKS = {"F": 1, "B": 2}  # of a pass, while the lists are made; those of the paper's figures


@register("pipeline", "hanayo", grain="stage", source=SOURCE, status="verified")
@dataclass(frozen=True, slots=True, kw_only=True)
class Hanayo(Order):
    """The model is cut into 2 W p stages that walk down the ranks and back up, W times. A rank
    begins, of the passes whose input is there, the one that is furthest on its way; but a pass may
    lead its rank's next one of the way by no more micro-batches than there are hops to the turn
    between them. That is the warm-up of 1F1B, at every turn.

    Symbols: p ranks, r a rank, m micro-batches (see the package), W `waves`; T_F, T_B seconds of a
    forward and a backward pass of one micro-batch through one rank's share of the model, of which
    a stage is 1 / (2 W).

    Costs, for equal stages, free transfers and m = p:
    - step time p (T_F + T_B) + (p - 1) T_B / W;
    - idle fraction for T_B = 2 T_F: (2p - 2) / (3 p W + 2p - 2). The paper's Figure 2 prints
      (2p - 2) / (3 p W + p - 1), which counts half of the idle time in the denominator; the
      schedules that it draws have the fraction given here;
    - peak of stages of micro-batches whose activations rank r keeps: (2W - 1) p + 1 + r, of the
      2 W p of a whole micro-batch on every rank;
    - messages: 2 W (p - 1) per micro-batch and direction; turns send nothing.
    W = 1 is Chimera on 2p devices without its second copy of the weights.

    Source: arXiv:2308.15762, section 3. The paper draws schedules and gives no rule; this rule
    gives those that it draws for (p, W) = (4, 1), (4, 2) and (8, 2).

    Differences and limits: the paper has m = p only; each further p micro-batches add 2p - 3
    forward passes of a stage of idle time, where interleaved's does not grow. Rank 0 holds the
    embedding and the head: weigh them as layers. The list is made for a backward pass twice as
    long as a forward pass, whatever the real ones take.

    Args:
        waves: W, walks down and back up.
    """

    waves: int = field(default=2, metadata={"low": 1})

    def num_stages(self, num_ranks: int) -> int:
        """2 W on each rank."""
        return 2 * self.waves * num_ranks

    def rank_of_stage(self, num_ranks: int) -> tuple[int, ...]:
        """Down the ranks and back up, W times."""
        return zigzag(num_ranks, 2 * self.waves)

    def order(self, num_ranks: int, num_items: int) -> list[list[Step]]:
        """The list of each rank."""
        require_sizes(num_ranks, num_items)
        ranks = [_Rank(rank, num_ranks, self.waves) for rank in range(num_ranks)]
        arrivals: dict[int, list[tuple[int, int]]] = defaultdict(list)
        arrivals[0] = [(0, 0)] * num_items
        last_leg, left = 4 * self.waves - 1, num_items * 4 * self.waves * num_ranks
        tick = 0
        while left:
            for rank, leg in arrivals.pop(tick, ()):
                ranks[rank].waiting[leg] += 1
            for at in ranks:
                begun = at.begin(tick)
                if begun is None:
                    continue
                left -= 1
                then = at.rank + (1 if begun % 2 == 0 else -1)
                if 0 <= then < num_ranks:
                    arrivals[at.free_at].append((then, begun))
                elif begun < last_leg:  # the turn
                    arrivals[at.free_at].append((at.rank, begun + 1))
            tick += 1
        return [at.steps for at in ranks]


class _Rank:
    """A rank while the lists are made. Its legs are numbered along the way of a micro-batch: 2 W
    forward ones, then 2 W backward ones; even ones walk down the ranks, odd ones up."""

    def __init__(self, rank: int, num_ranks: int, waves: int) -> None:
        self.rank, self.free_at = rank, 0
        self.steps: list[Step] = []
        num_legs = 4 * waves
        self.waiting = [0] * num_legs  # micro-batches whose input is there
        self._begun = [0] * num_legs
        self._stages, self._kinds = [], ["F"] * (2 * waves) + ["B"] * (2 * waves)
        for leg in range(num_legs):
            model_leg = leg if leg < 2 * waves else num_legs - 1 - leg
            along = rank if model_leg % 2 == 0 else num_ranks - 1 - rank
            self._stages.append(model_leg * num_ranks + along)
        self._credits = (num_ranks - rank, rank + 1)  # hops to the turn: walking down, walking up

    def begin(self, tick: int) -> int | None:
        """Begin what is furthest on its way, if this rank is free and may; the leg."""
        if self.free_at > tick:
            return None
        waiting, begun = self.waiting, self._begun
        last = len(begun) - 1
        for leg in range(last, -1, -1):
            if not waiting[leg]:
                continue
            if leg == last or begun[leg] - begun[leg + 1] < self._credits[leg % 2]:
                kind = self._kinds[leg]
                self.steps.append(Step(self._stages[leg], kind, begun[leg]))
                waiting[leg] -= 1
                begun[leg] += 1
                self.free_at = tick + _TICKS[kind]
                return leg
        return None
