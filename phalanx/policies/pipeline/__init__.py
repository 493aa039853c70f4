"""Pipeline schedules: which micro-batch a rank computes next, forward or backward.

Symbols that all schedules share
- p: pipeline ranks (`num_ranks`); r: one of them (`rank`, 0 holds the first stage).
- m: micro-batches of a step (`num_items`).
- t_f, t_b: seconds of one forward and one full backward pass of one micro-batch through the share
  of the model that one rank holds.
"""

from __future__ import annotations

from phalanx.errors import PlanError


def require_sizes(num_ranks: int, num_items: int) -> None:
    """Raise `order/illegal` unless there is at least one rank and one micro-batch."""
    for name, value in (("num_ranks", num_ranks), ("num_items", num_items)):
        if value < 1:
            raise PlanError("order/illegal", name, value, "must be at least 1", legal=[1])
