"""Hypothesis strategies for schedules, and what tests ask of a schedule.

A placement says which rank holds each stage. Any legal order of any placement can be drawn: several
stages per rank, turns (neighbouring stages on one rank), backward passes whole or in two parts.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.policy import Order, Step
from phalanx.workload import toy_work
from phalanx.worlds.sim import SimWorld

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


def simulate(
    order: Order, num_ranks: int, num_items: int, seconds: Mapping[str, float]
) -> tuple[float, list[float]]:
    """Step time, and the most micro-batches that each rank keeps at once, in the simulated world.

    Args:
        seconds: kind ("F", "B", "I", "W") -> seconds of a stage; transfers are free.
    """
    work = toy_work(order.num_stages(num_ranks), [1] * num_items)
    mesh = Mesh(pp=num_ranks)
    prices = {f"stage.{kind}": value for kind, value in seconds.items()}
    world = SimWorld(mesh, TableCost(prices | {"send": 0.0, "optimizer": 0.0}))
    trace = drive(world, program=lower(work, mesh, order, grain="stage"))
    kept_bytes = sum(block.saved_bytes_per_token for block in work.units[0].blocks)
    peaks = world.peak_bytes()
    return trace.end_s, [peaks[rank] / kept_bytes for rank in range(num_ranks)]


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
