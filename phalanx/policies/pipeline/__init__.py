"""Pipeline schedules: which micro-batch a rank computes next, forward or backward.

Symbols that all schedules share
- p: pipeline ranks (`num_ranks`); r: one of them (`rank`, 0 holds the first stage).
- m: micro-batches of a step (`num_items`).
- t_f, t_b: seconds of one forward and one full backward pass of one micro-batch through the share
  of the model that one rank holds.
"""

from __future__ import annotations

from phalanx.errors import PlanError
from phalanx.policy import Step


def require_sizes(num_ranks: int, num_items: int) -> None:
    """Raise `order/illegal` unless there is at least one rank and one micro-batch."""
    for name, value in (("num_ranks", num_ranks), ("num_items", num_items)):
        if value < 1:
            raise PlanError("order/illegal", name, value, "must be at least 1", legal=[1])


def zigzag(num_ranks: int, num_legs: int) -> tuple[int, ...]:
    """The rank of each stage where stages walk down the ranks and back up, `num_legs` walks in all.

    At each turn two consecutive stages are on one rank, so that the turn sends nothing.
    """
    down = range(num_ranks)
    return tuple(rank for leg in range(num_legs) for rank in (down if leg % 2 == 0 else down[::-1]))


class TwoChunks:
    """The list of one rank that holds two chunks of a folded pipeline, written pass by pass.

    Chunk 0 is met on the way down, chunk 1 on the way back. Passes of a kind and chunk take their
    items in order, so a pass is named without an item: "F0", "I1", "W1", "B0". "W" without a chunk
    is the weight gradient that has waited longest, and nothing where none waits.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.steps: list[Step] = []
        self._stages = (rank, 2 * num_ranks - 1 - rank)
        self._num_done = dict.fromkeys(("F0", "F1", "B0", "B1"), 0)
        self._waiting: list[Step] = []  # weight gradients whose input gradient is done

    def num_done(self, pass_name: str) -> int:
        """Forward ("F0") or backward passes ("B1": whole or input gradients) of a chunk so far."""
        return self._num_done[pass_name]

    def num_waiting(self, chunk: int) -> int:
        """Weight gradients of a chunk whose input gradient is done."""
        return sum(step.stage == self._stages[chunk] for step in self._waiting)

    def write(self, pass_names: str, times: int = 1) -> None:
        """Append passes ("F1 I1 W1"), all of them so many times."""
        for name in pass_names.split() * times:
            if name[0] == "W":
                self._write_weight(name[1:])
                continue
            kind, stage = name[0], self._stages[int(name[1])]
            counter = ("F" if kind == "F" else "B") + name[1]
            item = self._num_done[counter]
            self._num_done[counter] += 1
            self.steps.append(Step(stage, kind, item))
            if kind == "I":
                self._waiting.append(Step(stage, "W", item))

    def _write_weight(self, chunk: str) -> None:
        stages = (self._stages[int(chunk)],) if chunk else self._stages
        step = next((each for each in self._waiting if each.stage in stages), None)
        if step is not None:
            self._waiting.remove(step)
            self.steps.append(step)
