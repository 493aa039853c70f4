"""Prices of a lowered training step from the rates that were measured on this machine. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.action import Collective, Compute, Move, Send
from phalanx.errors import PlanError

# Exchanges of activations are priced as parts of an all-reduce, as `cost.training` does.
_OF_BLOCKS = ("act:", "grad:", "input:", "keys_values:", "queries:", "heads:")
_OF_ALL_REDUCE = {"all_gather": 0.5, "reduce_scatter": 0.5, "all_reduce": 1.0}


class MeasuredRates(dict[str, float]):
    """Rates of a calibration by their keys.

    Raises:
        PlanError: `plan/illegal` when asked for one that was not measured.
    """

    def __missing__(self, key: str) -> float:
        raise _unmeasured(key)


@dataclass(frozen=True)
class RatesCost:
    """Seconds that agree, action by action, with the sums of `cost.training.predict`.

    Attributes:
        block_s: (block, phase) -> seconds of one micro-batch; phases "F", "B", "I" and "W".
        optimizer_s: of the step's update.
        bytes_per_s: collective -> payload bytes per second, all members at once.

    Raises:
        PlanError: `plan/illegal` when asked for what has no measured rate (copies between
            memories).
    """

    block_s: Mapping[tuple[str, str], float]
    optimizer_s: float
    bytes_per_s: Mapping[str, float]

    def compute_s(self, action: Compute, rank: int) -> float:
        """The block's measured operators, or the update."""
        if action.op == "optimizer":
            return self.optimizer_s
        return self.block_s[action.layer, action.phase]

    def collective_s(self, action: Collective, members: Sequence[int]) -> float:
        """Payload over the measured rate; activations go by that of an all-reduce."""
        if len(members) < 2:
            return 0.0
        if action.tensor.startswith(_OF_BLOCKS):
            share = _OF_ALL_REDUCE.get(action.collective, 0.5)
            return share * action.payload_bytes / self.bytes_per_s["all_reduce"]
        return action.payload_bytes / self.bytes_per_s[action.collective]

    def transfer_s(self, action: Send, source: int, target: int) -> float:
        """Payload over the measured rate."""
        return action.payload_bytes / self.bytes_per_s["p2p"]

    def transfer_latency_s(self, action: Send, source: int, target: int) -> float:
        """Part of the rate."""
        return 0.0

    def move_s(self, action: Move, rank: int) -> float:
        """Copies between memories are not measured."""
        raise _unmeasured("a copy between memories")

    def rank_class(self, rank: int) -> int:
        """Processes of one machine are alike."""
        return 0


def _unmeasured(what: str) -> PlanError:
    return PlanError("plan/illegal", "cost.rates", what, "has no rate measured on this machine")
