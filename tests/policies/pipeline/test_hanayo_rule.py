"""Hanayo's lists are those of its rule, written down a second time as scheduling by events."""

from __future__ import annotations

from collections import Counter

import pytest

from phalanx.policies.pipeline.hanayo import Hanayo
from phalanx.policy import Step

TICKS = {"F": 1, "B": 2}
Visit = tuple[str, int]  # kind and leg
SIZES = [(2, 1, 2), (3, 2, 3), (4, 1, 4), (4, 2, 4), (4, 4, 4), (8, 2, 8), (3, 2, 7), (4, 1, 3)]


def next_visit(kind: str, leg: int, num_legs: int) -> Visit | None:
    """Where a micro-batch meets the device again."""
    if kind == "F":
        return ("F", leg + 1) if leg + 1 < num_legs else ("B", leg)
    return ("B", leg - 1) if leg else None


def cap(kind: str, leg: int, device: int, p: int, num_legs: int) -> int:
    """Hops to the turn before the next visit: at the bottom p - d, at the top d + 1."""
    if kind == "F":
        at_bottom = leg % 2 == 0 and leg < num_legs - 1
        return p - device if at_bottom else device + 1
    return p - device if leg % 2 == 1 else device + 1


def lists_by_events(p: int, waves: int, m: int) -> list[list[Step]]:
    """Again and again the event that can start first, of those that have their input and credit;
    of a device's equals backward before forward, then what is further on its way."""
    num_legs = 2 * waves
    num_stages = num_legs * p
    ends: dict[Step, int] = {}
    free, begun = [0] * p, [Counter[Visit]() for _ in range(p)]
    lists: list[list[Step]] = [[] for _ in range(p)]
    left = {Step(s, kind, at) for s in range(num_stages) for kind in "FB" for at in range(m)}

    def device(stage: int) -> int:
        leg, k = divmod(stage, p)
        return k if leg % 2 == 0 else p - 1 - k

    def input_of(step: Step) -> Step | None:
        if step.kind == "F":
            return Step(step.stage - 1, "F", step.item) if step.stage else None
        last = step.stage == num_stages - 1
        return Step(step.stage, "F", step.item) if last else step._replace(stage=step.stage + 1)

    def admitted(step: Step) -> bool:
        at, leg = device(step.stage), step.stage // p
        after = next_visit(step.kind, leg, num_legs)
        if after is None:
            return True
        lead = begun[at][step.kind, leg] - begun[at][after]
        return lead < cap(step.kind, leg, at, p, num_legs)

    while left:
        can = []
        for step in left:
            needs = input_of(step)
            if (needs is None or needs in ends) and admitted(step):
                at = device(step.stage)
                start = max(free[at], ends[needs] if needs else 0)
                further = -step.stage if step.kind == "F" else step.stage
                can.append((start, step.kind, further, step.item, step))
        start, _, _, _, step = min(can)
        at = device(step.stage)
        free[at] = ends[step] = start + TICKS[step.kind]
        begun[at][step.kind, step.stage // p] += 1
        lists[at].append(step)
        left.remove(step)
    return lists


@pytest.mark.parametrize(("p", "waves", "m"), SIZES)
def test_lists_are_those_of_the_rule(p, waves, m):
    assert Hanayo(waves=waves).order(p, m) == lists_by_events(p, waves, m)
