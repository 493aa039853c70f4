"""Prices from a table: whole numbers for tests and toys, measured ones for calibrated operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.action import Action, Collective, Compute, Move, Send
from phalanx.errors import JobError, WorldError, nearest_names
from phalanx.strict import read_value


@dataclass(frozen=True)
class TableCost:
    """Seconds by name.

    The first key that the table has counts: the action's label ("2F0"), operator@axis for
    communication ("all_gather@tp"), operator ("mlp.F", "all_gather", "send", "move").

    Attributes:
        seconds: name -> seconds, >= 0.
        missing_s: price of everything else (None: an unknown name is an error).
        latency_frac: share of a transfer that is latency (see `CostModel.transfer_latency_s`).

    Raises:
        JobError: `job/bad-value` for a price that is no finite number or negative.
        WorldError: `world/unbound` when asked for a name that the table does not have.
    """

    seconds: Mapping[str, float]
    missing_s: float | None = None
    latency_frac: float = 0.0

    def __post_init__(self) -> None:
        for name, value in self.seconds.items():
            if read_value(value, float, f"cost.{name}") < 0:
                rule = "a price must be at least 0"
                raise JobError("job/bad-value", f"cost.{name}", value, rule, legal=[0])

    def _price(self, action: Action, axis: str = "") -> float:
        operator = action.operator
        for key in (action.label, f"{operator}@{axis}", operator):
            if key in self.seconds:
                return self.seconds[key]
        if self.missing_s is not None:
            return self.missing_s
        raise WorldError(
            "world/unbound",
            f"cost of {action.label or operator}",
            repr(operator),
            "the cost table has no such operator",
            legal=nearest_names(operator, self.seconds),
        )

    def compute_s(self, action: Compute, rank: int) -> float:
        """The table's value for the op."""
        return self._price(action)

    def collective_s(self, action: Collective, members: Sequence[int]) -> float:
        """The table's value for the collective, however many members."""
        return self._price(action, action.axis)

    def transfer_s(self, action: Send, source: int, target: int) -> float:
        """The table's value for "send"."""
        return self._price(action, action.axis)

    def transfer_latency_s(self, action: Send, source: int, target: int) -> float:
        """`latency_frac` of the transfer."""
        return self.latency_frac * self._price(action, action.axis)

    def move_s(self, action: Move, rank: int) -> float:
        """The table's value for "move"."""
        return self._price(action)

    def rank_class(self, rank: int) -> int:
        """All ranks are alike."""
        return 0
