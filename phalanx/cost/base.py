"""What a cost model answers. Seconds in virtual time; sizes and work come from the actions."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from phalanx.action import Collective, Compute, Move, Send


class CostModel(Protocol):
    """Prices of actions. Every answer is finite, >= 0 and the same each time it is asked.

    The simulator asks once for each distinct list and rank class, so a price may depend on all
    fields of an action, but never on when it runs: contention belongs to the world's links and
    lanes.
    """

    def compute_s(self, action: Compute, rank: int) -> float:
        """Seconds that `rank` computes."""
        ...

    def collective_s(self, action: Collective, members: Sequence[int]) -> float:
        """Seconds from the moment the last of `members` (global ranks) has arrived."""
        ...

    def transfer_s(self, action: Send, source: int, target: int) -> float:
        """Seconds of a message between two ranks (global) on an idle link."""
        ...

    def transfer_latency_s(self, action: Send, source: int, target: int) -> float:
        """The part of `transfer_s` during which no bandwidth is used, hence none is shared."""
        ...

    def move_s(self, action: Move, rank: int) -> float:
        """Seconds of a copy between memories of one rank."""
        ...

    def rank_class(self, rank: int) -> Hashable:
        """Ranks of equal class have equal prices, alone and in groups of equal classes."""
        ...
