"""A pipeline step as arrays: the times of the event world, for thousands of pipelines at once.

A compute-only schedule has one history up to its durations: a pass starts when the pass before it
on its rank has ended and its input has arrived, and a message starts when its tensor is there and
the message before it on the same channel is through. Both are maxima and sums, so the passes are
put in one order that respects what waits for what, and each is computed for all replicas at once.
What differs between replicas is durations only, for instance because every rank has documents of
other lengths.

Same as `SimWorld` playing the lowered program at grain "stage" with private links; what that world
has beyond (shared links, collectives, faults) is left out. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from phalanx.errors import CheckError, PlanError
from phalanx.policy import Step

_PASS = {"F": "F", "B": "B", "I": "B"}  # what a pass hands on; W hands on nothing
_NOTHING = -1


class Row(NamedTuple):
    """A pass and what it waits for; numbers are those of other rows, -1: of none.

    Attributes:
        step: the pass; rank: that runs it.
        before: the pass before it on its rank.
        source: the pass whose output it takes.
        travels: whether that output comes from another rank.
        channel_before: the pass whose message goes over its channel before its own.
        sends: whether its output goes to another rank.
    """

    step: Step
    rank: int
    before: int
    source: int
    travels: bool
    channel_before: int
    sends: bool


@dataclass(frozen=True)
class Wired:
    """A schedule with its dependencies.

    Attributes:
        rows: in an order in which all can be computed.
        num_ranks, num_stages, num_items: sizes.
    """

    rows: tuple[Row, ...]
    num_ranks: int
    num_stages: int
    num_items: int

    @cached_property
    def peak_in_flight(self) -> np.ndarray:
        """Most chunks of micro-batches whose activations each rank keeps [ranks]."""
        held = np.zeros(self.num_ranks, dtype=int)
        peak = np.zeros(self.num_ranks, dtype=int)
        for row in self.rows:
            held[row.rank] += {"F": 1, "B": -1, "W": -1}.get(row.step.kind, 0)
            peak[row.rank] = max(peak[row.rank], held[row.rank])
        return peak


@dataclass(frozen=True)
class Played:
    """Times of R replicas of a pipeline.

    Attributes:
        wired: the schedule.
        start_s, end_s: of each pass [passes, R].
        step_s: end of the last pass [R].
        busy_s: seconds that each rank computes [ranks, R].
    """

    wired: Wired
    start_s: np.ndarray
    end_s: np.ndarray
    step_s: np.ndarray
    busy_s: np.ndarray

    @property
    def peak_in_flight(self) -> np.ndarray:
        """Most chunks of micro-batches that each rank keeps [ranks]."""
        return self.wired.peak_in_flight

    @property
    def idle_frac(self) -> float:
        """Share of the step in which a rank waits, mean over ranks and replicas; the step is that
        of the slowest replica."""
        return float(1.0 - self.busy_s.mean() / self.step_s.max())

    @property
    def bubble_frac(self) -> float:
        """The same over the time of the computes: (p - 1) / (m v) for interleaved equal stages."""
        return float(self.step_s.max() / self.busy_s.mean() - 1.0)


def play(
    order: Sequence[Sequence[Step]] | Wired,
    forward_s: Any,
    backward_s: Any,
    p2p_s: Any = 0.0,
    weight_s: Any = 0.0,
    input_s: Any = None,
) -> Played:
    """Play a schedule.

    Args:
        order: lists of an `Order`, or what `wire` made of them.
        forward_s, backward_s: seconds of a pass of one stage and item; numbers, or arrays that
            broadcast to [stages, items, R]; `backward_s` of a whole backward pass ("B").
        p2p_s: seconds of a message, likewise; by the stage and item that sends.
        weight_s: seconds of a weight gradient ("W").
        input_s: seconds of an input gradient ("I"); None: as `backward_s`.

    Raises:
        CheckError: `check/deadlock` for lists that can never finish.
        PlanError: `order/illegal` for seconds that are negative, not finite or of another shape.
    """
    wired = order if isinstance(order, Wired) else wire(order)
    seconds = {
        "F": _table(wired, "forward_s", forward_s),
        "B": _table(wired, "backward_s", backward_s),
        "W": _table(wired, "weight_s", weight_s),
    }
    seconds["I"] = seconds["B"] if input_s is None else _table(wired, "input_s", input_s)
    message = _table(wired, "p2p_s", p2p_s)
    replicas = max(each.shape[2] for each in (*seconds.values(), message))
    if replicas == 1:
        return _play_one(wired, seconds, message)
    shape = (len(wired.rows) + 1, replicas)
    start_s, end_s, through_s = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    busy_s = np.zeros((wired.num_ranks, replicas))
    for at, row in enumerate(wired.rows):  # row -1 is never written: what waits for it may begin
        stage, kind, item = row.step
        arrived_s = through_s if row.travels else end_s
        np.maximum(end_s[row.before], arrived_s[row.source], out=start_s[at])
        dur_s = seconds[kind][stage, item]
        np.add(start_s[at], dur_s, out=end_s[at])
        busy_s[row.rank] += dur_s
        if row.sends:
            np.maximum(end_s[at], through_s[row.channel_before], out=through_s[at])
            through_s[at] += message[stage, item]
    return Played(wired, start_s[:-1], end_s[:-1], end_s[:-1].max(axis=0), busy_s)


def _play_one(wired: Wired, seconds: Mapping[str, np.ndarray], message: np.ndarray) -> Played:
    """One replica, in plain numbers: arrays of one element cost ten times as much."""
    table = {kind: array[:, :, 0].tolist() for kind, array in seconds.items()}
    message_s = message[:, :, 0].tolist()
    count = len(wired.rows)
    start_s, end_s, through_s = [0.0] * count, [0.0] * (count + 1), [0.0] * (count + 1)
    busy_s = [0.0] * wired.num_ranks
    for at, (step, rank, before, source, travels, channel_before, sends) in enumerate(wired.rows):
        stage, kind, item = step
        began_s = max(end_s[before], (through_s if travels else end_s)[source])
        dur_s = table[kind][stage][item]
        start_s[at], end_s[at] = began_s, began_s + dur_s
        busy_s[rank] += dur_s
        if sends:
            through_s[at] = max(end_s[at], through_s[channel_before]) + message_s[stage][item]
    ends = np.asarray(end_s[:-1])[:, None]
    busy = np.asarray(busy_s)[:, None]
    return Played(wired, np.asarray(start_s)[:, None], ends, ends.max(axis=0), busy)


def _table(wired: Wired, name: str, given: Any) -> np.ndarray:
    """As [stages, items, 1 or R], without copies."""
    array = np.asarray(given, dtype=float)
    array = array.reshape(array.shape + (1,) * (3 - array.ndim)) if array.ndim < 3 else array
    rule = "must be seconds >= 0 for [stages, items, replicas]"
    expected = (wired.num_stages, wired.num_items)
    if array.ndim != 3 or any(a not in (1, b) for a, b in zip(array.shape, expected)):
        raise PlanError("order/illegal", name, array.shape, rule, legal=[(*expected, "R")])
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise PlanError("order/illegal", name, "negative or not finite", rule)
    return np.broadcast_to(array, (*expected, array.shape[2]))


def wire(lists: Sequence[Sequence[Step]]) -> Wired:
    """Find what waits for what.

    Raises:
        CheckError: `check/deadlock` for lists that can never finish; `order/missing` for none.
    """
    holder = {step.stage: rank for rank, steps in enumerate(lists) for step in steps}
    if not holder:
        raise CheckError("order/missing", "lists", None, "a schedule has at least one pass")
    last_stage = max(holder)
    outputs: dict[tuple[str, int, int], int] = {}
    rows: list[Row] = []
    heads, tails = [0] * len(lists), [_NOTHING] * len(lists)
    channels: dict[tuple[int, int], int] = {}
    progressed = True
    while progressed:
        progressed = False
        for rank, steps in enumerate(lists):
            for at in range(heads[rank], len(steps)):
                step = steps[at]
                needed = _needed(step, last_stage)
                if needed is not None and needed not in outputs:
                    break
                source = _NOTHING if needed is None else outputs[needed]
                channel = (rank, _target(step, holder, rank))
                rows.append(
                    Row(
                        step=step,
                        rank=rank,
                        before=tails[rank],
                        source=source,
                        travels=source != _NOTHING and rows[source].rank != rank,
                        channel_before=channels.get(channel, _NOTHING),
                        sends=channel[1] != rank,
                    )
                )
                tails[rank] = len(rows) - 1
                if channel[1] != rank:
                    channels[channel] = tails[rank]
                if step.kind in _PASS:
                    outputs[_PASS[step.kind], step.stage, step.item] = tails[rank]
                heads[rank] += 1
                progressed = True
    stuck = {r: str(steps[heads[r]]) for r, steps in enumerate(lists) if heads[r] < len(steps)}
    if stuck:
        rule = "every list waits for an input that no list produces before it"
        raise CheckError("check/deadlock", "order", stuck, rule)
    return Wired(
        rows=tuple(rows),
        num_ranks=len(lists),
        num_stages=last_stage + 1,
        num_items=max(row.step.item for row in rows) + 1,
    )


def _needed(step: Step, last_stage: int) -> tuple[str, int, int] | None:
    """The pass whose output a pass takes; of a weight gradient that of its own rank's input
    gradient, which came before."""
    if step.kind == "F":
        return ("F", step.stage - 1, step.item) if step.stage else None
    if step.kind == "W":
        return None
    if step.stage == last_stage:
        return ("F", last_stage, step.item)
    return ("B", step.stage + 1, step.item)


def _target(step: Step, holder: Mapping[int, int], rank: int) -> int:
    """The rank that takes the output; its own where nobody else does."""
    if step.kind == "W":
        return rank
    return holder.get(step.stage + (1 if step.kind == "F" else -1), rank)
