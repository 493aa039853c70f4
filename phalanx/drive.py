"""The one loop that connects policies to a world."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from phalanx.action import Program
from phalanx.policy import React
from phalanx.trace import Trace
from phalanx.worlds.base import World


def drive(
    world: World,
    *,
    program: Program | None = None,
    num_steps: int = 1,
    reacts: Sequence[React] = (),
) -> Trace:
    """Carry out `program`, let each React policy answer events, until nothing is left to happen.

    Args:
        world: where it happens.
        program: planned actions of one step, loaded before the first event (None: only reactions).
        num_steps: how often the program runs. The next step is loaded after the policies answered
            the "step" event of the one before, so their actions come first in every lane.
        reacts: policies that decide while running, in order of precedence.

    Returns:
        The trace of the ranks that this process plays.
    """
    steps_left, newest_step = 0, 0
    if program is not None:
        world.load(program)
        steps_left = num_steps - 1
    views = [world.view(policy.scope) for policy in reacts]
    states = [policy.start(view) for policy, view in zip(reacts, views)]
    while events := world.next_events():
        for policy, state, view in zip(reacts, states, views):
            decide = partial(policy.on, state, events, view)
            world.issue(world.agree(policy.scope, decide))
        ended = max((event.item for event in events if event.kind == "step"), default=0)
        if program is not None and steps_left and ended > newest_step:
            newest_step = ended  # ranks may tell of one step at different times
            world.load(program)
            steps_left -= 1
    return world.close()
