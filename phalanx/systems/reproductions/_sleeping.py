"""Schedules whose passes sleep: what `benchmarks/pipeline.py` runs on real processes, simulated.

A micro-batch takes `FORWARD_S` and `BACKWARD_S` on one rank's share of the model, whatever the
number of its stages.
"""

from __future__ import annotations

from typing import Any

from phalanx.policy import Order
from phalanx.registry import build
from phalanx.worlds.pipeline_arrays import play

ORDERS: dict[str, Any] = {
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    "interleaved v=2": {"name": "interleaved", "virtual": 2},
    "ZB-H1": "zero_bubble",
    "Hanayo W=1": {"name": "hanayo", "waves": 1},
    "Hanayo W=2": {"name": "hanayo", "waves": 2},
    "Hanayo W=4": {"name": "hanayo", "waves": 4},
}
ITEMS = 4
FORWARD_S, BACKWARD_S = 0.16, 0.32
AGREES_FRAC = 0.10


def asleep_s(name: str, num_ranks: int, message_s: float = 0.0) -> float:
    """Simulated seconds of a step.

    Torch leaves the input gradient of the first stage to its weight gradient.
    """
    order: Order = build("pipeline", ORDERS[name])
    share = num_ranks / order.num_stages(num_ranks)
    half_s = share * BACKWARD_S / 2
    later = order.num_stages(num_ranks) - 1
    input_s = [[[each]] for each in [0.0] + [half_s] * later]
    weight_s = [[[each]] for each in [2 * half_s] + [half_s] * later]
    lists = order.order(num_ranks, ITEMS)
    seconds = (share * FORWARD_S, share * BACKWARD_S, message_s, weight_s, input_s)
    return float(play(lists, *seconds).step_s[0])
