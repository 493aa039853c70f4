"""Hypothesis strategies for schedules, and what tests ask of a schedule.

A placement says which rank holds each stage. Any legal order of any placement can be drawn: several
stages per rank, turns (neighbouring stages on one rank), backward passes whole or in two parts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from phalanx.policy import Order, Step

Lists = list[list[Step]]
Drawn = tuple[Lists, tuple[int, ...], int]  # lists, rank_of_stage, num_items

sizes = st.tuples(st.integers(2, 4), st.integers(1, 9))  # num_ranks, num_items


@st.composite
def placements(draw: st.DrawFn, max_ranks: int = 4, max_stages: int = 7) -> tuple[int, ...]:
    """The rank of each stage; every rank holds one at least."""
    num_ranks = draw(st.integers(1, max_ranks))
    more = st.integers(0, num_ranks - 1)
    holders = draw(st.lists(more, max_size=max_stages - num_ranks))
    return tuple(draw(st.permutations([*range(num_ranks), *holders])))


@st.composite
def orders(draw: st.DrawFn, max_items: int = 5) -> Drawn:
    """Some legal order."""
    rank_of_stage = draw(placements())
    num_items = draw(st.integers(1, max_items))
    lists = random_order(rank_of_stage, num_items, draw(st.integers(0, 2**32 - 1)))
    return lists, rank_of_stage, num_items


def random_order(rank_of_stage: Sequence[int], num_items: int, seed: int) -> Lists:
    """A legal order: steps are taken one by one, each among those whose inputs exist."""
    choose = random.Random(seed)
    last_stage = len(rank_of_stage) - 1
    waiting = []
    for stage in range(last_stage + 1):
        for item in range(num_items):
            kinds = "F" + choose.choice(["B", "IW"])
            waiting += [Step(stage, kind, item) for kind in kinds]
    done: set[Step] = set()
    lists: Lists = [[] for _ in range(max(rank_of_stage) + 1)]
    while waiting:
        step = choose.choice([each for each in waiting if is_ready(each, done, last_stage)])
        waiting.remove(step)
        done.add(step)
        lists[rank_of_stage[step.stage]].append(step)
    return lists


def is_ready(step: Step, done: Collection[Step], last_stage: int) -> bool:
    """Whether everything that a step needs is among `done`."""
    stage, kind, item = step
    if kind == "W":
        return Step(stage, "I", item) in done
    if kind == "F":
        return stage == 0 or Step(stage - 1, "F", item) in done
    behind = (Step(stage + 1, "B", item), Step(stage + 1, "I", item))
    has_gradient = stage == last_stage or any(each in done for each in behind)
    return has_gradient and Step(stage, "F", item) in done


def play(
    lists: Sequence[Sequence[Step]], num_stages: int, seconds: Callable[[Step], float]
) -> dict[Step, float]:
    """When each step ends if transfers are free, ranks start together and never wait by choice.

    An independent reference for simulated times; asserts that no rank waits for ever.
    """
    ends: dict[Step, float] = {}
    next_of = [0] * len(lists)
    free_s = [0.0] * len(lists)
    while True:
        moved = False
        for rank, steps in enumerate(lists):
            while next_of[rank] < len(steps) and is_ready(
                steps[next_of[rank]], ends, num_stages - 1
            ):
                step = steps[next_of[rank]]
                free_s[rank] = max(free_s[rank], _input_s(step, ends)) + seconds(step)
                ends[step] = free_s[rank]
                next_of[rank] += 1
                moved = True
        if not moved:
            stuck = [str(s[at]) for s, at in zip(lists, next_of) if at < len(s)]
            assert not stuck, f"wait for ever: {stuck}"
            return ends


def _input_s(step: Step, ends: dict[Step, float]) -> float:
    stage, kind, item = step
    needs = {
        "F": [(stage - 1, "F")],
        "W": [(stage, "I")],
    }.get(kind, [(stage, "F"), (stage + 1, "B"), (stage + 1, "I")])
    return max((ends.get(Step(*need, item), 0.0) for need in needs), default=0.0)


def peak_items(steps: Sequence[Step]) -> int:
    """The most (stage, micro-batch) pairs whose activations a rank keeps at once."""
    kept = peak = 0
    for step in steps:
        kept += {"F": 1, "B": -1, "W": -1}.get(step.kind, 0)
        peak = max(peak, kept)
    return peak


def as_text(lists: Sequence[Sequence[Step]]) -> list[str]:
    """One line per rank: "0F0 0B0"."""
    return [" ".join(map(str, steps)) for steps in lists]


@dataclass(frozen=True)
class FixedOrder(Order):
    """An Order that gives lists written down or drawn."""

    lists: Lists
    placement: tuple[int, ...]

    def num_stages(self, num_ranks: int) -> int:
        return len(self.placement)

    def rank_of_stage(self, num_ranks: int) -> tuple[int, ...]:
        return self.placement

    def order(self, num_ranks: int, num_items: int) -> Lists:
        return self.lists
