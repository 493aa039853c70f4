"""What every world can do. A new member needs a reason, because every world pays for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from phalanx.action import Action, Program
from phalanx.mesh import Mesh
from phalanx.policy import Event, View
from phalanx.trace import Trace


class World(Protocol):
    """Where a program and the decisions of React policies happen.

    Attributes:
        mesh: the grid of the job.
        ranks: the ranks that this process plays: all of them in `sim` and `local`, one in `dist`.
    """

    mesh: Mesh
    ranks: Sequence[int]

    def view(self, scope: str) -> View:
        """The live view of a scope ("job", "island", "engine")."""
        ...

    def load(self, program: Program) -> None:
        """Queue one step of planned actions on the ranks that this process plays. One "step" event
        (item = 1, 2, ... per load) follows when the lowest of these ranks has ended its list; other
        ranks may lag, their lanes keep the order."""
        ...

    def issue(self, actions: Sequence[Action]) -> None:
        """Queue decided actions on the members that each action's `ranks` names; without any, on
        the `members` of a collective that has some, else on everyone."""
        ...

    def agree(self, scope: str, decide: Callable[[], list[Action]]) -> list[Action]:
        """The leader's decision. Leaders call `decide` and send it with (epoch, seq) to the others;
        worlds that play all ranks just call it."""
        ...

    def next_events(self) -> list[Event]:
        """Run until something happens that a policy may care about; [] when nothing ever will. The
        first call gives one "start" event, before anything runs."""
        ...

    def close(self) -> Trace:
        """What happened on the ranks that this process plays."""
        ...
