"""The simulated world: all ranks in virtual time, exact for whole-number costs.

What happens
- A lane runs its actions in list order, one at a time; `after` waits for labels of the same rank.
- A collective starts when all members have arrived and ends for all of them together. The k-th
  collective of a rank in a group meets the k-th of the others.
- A message is a rendezvous: send and receive start when both are there and end together. They are
  matched first in, first out per (source, target, axis, tensor).
- Alloc, Free and Mark take no time. A Timer occupies no lane: it starts once its `after` is done.
- Zero-duration actions and everything else of one moment happen before a policy is asked again.

What policies hear: "start" once, "step" when the lowest rank has ended a loaded program, "done" for
every labelled decided action (per rank), "timer" for every timer, "leave" and "join" from faults,
and what `post` was given. A decided collective with `members` and no `ranks` is carried out by its
members. A Mark named "commit" sets the view's `step` to its value. In the trace, `step` counts the
loaded programs from 1, or where there is none, the steps committed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from phalanx.action import Action, Collective, Program
from phalanx.cost.base import CostModel
from phalanx.errors import PlanError
from phalanx.mesh import Mesh
from phalanx.policy import Event, View
from phalanx.trace import Trace
from phalanx.worlds.faults import FaultScript
from phalanx.worlds.sim_engine import Engine, Outcome
from phalanx.worlds.sim_faults import Faults
from phalanx.worlds.sim_fold import equitable_colors
from phalanx.worlds.sim_links import Links
from phalanx.worlds.sim_memory import MemoryAccount
from phalanx.worlds.sim_stuck import stuck_error
from phalanx.worlds.sim_trace import build_trace

__all__ = ["Links", "SimWorld"]


class SimWorld:
    """A mesh in virtual time.

    Args:
        mesh: the grid.
        cost: prices of actions.
        memory_bytes: limit of the device memory, or memory -> limit (None: only peaks are kept).
        links: links that messages share (None: every pair has its own).
        faults: what goes wrong.
        job: name for the trace.
        facts: what policies find in their views.
        outcomes: operator -> (action, its "done" event) -> what policies hear instead, for actions
            whose end carries data (an engine step with its accepted counts).
        fold: one rank plays all that are alike (`sim_fold`); for programs without faults, shared
            links and decided actions. The trace then holds the rows of the players only, and its
            notes say how many ranks each of them stands for ("ranks_played").

    Attributes:
        ranks: the ranks that have rows: all, or the players.

    Raises:
        JobError: `mesh/rank` for a fault of an unknown rank.
        PlanError: `plan/illegal` for folding together with faults or links.
    """

    def __init__(
        self,
        mesh: Mesh,
        cost: CostModel,
        *,
        memory_bytes: float | Mapping[str, float] | None = None,
        links: Links | None = None,
        faults: FaultScript | None = None,
        job: str = "",
        facts: Mapping[str, Any] | None = None,
        outcomes: Mapping[str, Outcome] | None = None,
        fold: bool = False,
    ) -> None:
        if fold and (links is not None or faults is not None):
            rule = "ranks cannot stand for one another with faults or shared links"
            raise PlanError("plan/illegal", "fold", True, rule, legal=[False])
        self.mesh, self.job = mesh, job
        self.ranks: Sequence[int] = range(mesh.size)
        self._memory = MemoryAccount(memory_bytes)
        self._make_engine = partial(Engine, mesh, cost, links=links, memory=self._memory)
        self._engine = self._make_engine()
        self._engine.outcomes = outcomes or {}
        self._engine.committed = self._committed
        self._faults = None
        if faults is not None:
            self._faults = Faults(self._engine, faults, self._change_membership)
        self._folded = fold
        self._facts: Mapping[str, Any] = facts if facts is not None else {}
        self._views: dict[str, View] = {}
        self._members = tuple(range(mesh.size))
        self._epoch = self._step = self._num_loads = 0
        self._started = False

    def view(self, scope: str) -> View:
        """The live view of a scope; every scope has all ranks as members here."""
        if scope not in self._views:
            self._views[scope] = View(mesh=self.mesh, facts=self._facts)
            self._refresh_views()
        return self._views[scope]

    def load(self, program: Program) -> None:
        """Queue one step of planned actions on all live ranks.

        Raises:
            CheckError: `check/label` for unknown and doubled labels.
            PlanError: `plan/illegal` for a program of another mesh.
        """
        if program.mesh != self.mesh:
            rule = f"the world's mesh is {self.mesh}"
            raise PlanError("plan/illegal", "program.mesh", program.mesh, rule)
        if self._folded:
            self._fold(program)
        alive = [rank for rank in self.ranks if rank in self._alive()]
        first = len(self._engine.table)
        self._num_loads += 1
        roots = self._engine.loader.add_program(program, alive, self._num_loads)
        self._place(first, roots, decided=False)

    def issue(self, actions: Sequence[Action]) -> None:
        """Queue decided actions on the members that each action's `ranks` names.

        Raises:
            CheckError: `check/label` for an `after` label that a rank never had.
        """
        if not actions:
            return
        if self._folded:
            rule = "decided actions need all ranks"
            raise PlanError("plan/illegal", "fold", True, rule, legal=[False])
        by_rank: dict[int, list[Action]] = {}
        for action in actions:
            for rank in self._addressees(action):
                by_rank.setdefault(rank, []).append(action)
        alike: dict[tuple[int, ...], tuple[list[Action], list[int]]] = {}
        for rank, its in sorted(by_rank.items()):
            alike.setdefault(tuple(map(id, its)), (its, []))[1].append(rank)
        first = len(self._engine.table)
        roots = []
        for its, ranks in alike.values():
            step = max(self._num_loads, self._step)
            roots += self._engine.loader.add_actions(its, ranks, step)
        self._place(first, roots, decided=True)
        if self._faults is not None and not self._num_loads:
            self._faults.stepped(self._step)

    def agree(self, scope: str, decide: Callable[[], list[Action]]) -> list[Action]:
        """The decision: this process plays leaders and followers."""
        return decide()

    def post(self, *events: Event) -> None:
        """Events from outside, such as arriving requests; policies hear them at their `time_s`."""
        for event in events:
            self._engine.at(event.time_s, partial(self._engine.events.append, event))

    def next_events(self) -> list[Event]:
        """Let time pass until something happens that policies hear of; [] at the end.

        Raises:
            CheckError: `check/deadlock`, `check/collective`, `check/size`, `check/memory`,
                `check/handle`: the program is wrong.
            WorldError: `world/dead` or `world/timeout`: a fault left live ranks waiting for ever.
        """
        if not self._started:
            self._started = True
            return [Event(kind="start", time_s=self._engine.now_s)]
        self._engine.run()
        events = list(self._engine.events)
        self._engine.events.clear()
        self._refresh_views()
        if not events:
            error = stuck_error(self._engine, self._faults)
            if error is not None:
                raise error
        return events

    def close(self) -> Trace:
        """The rows of all ranks; notes hold the memory peaks."""
        peaks: dict[str, dict[str, float]] = {}
        for (rank, memory), peak in self._memory.peak.items():
            peaks.setdefault(memory, {})[str(rank)] = peak
        notes: dict[str, Any] = {"peak_bytes": peaks}
        if self._folded:
            played = Counter(self._engine.matcher.player.tolist())
            notes["ranks_played"] = {str(rank): played[rank] for rank in self.ranks}
        return build_trace(self._engine, self.job, notes)

    def peak_bytes(self, memory: str = "device") -> dict[int, float]:
        """Most bytes that each rank held at a time."""
        return self._memory.peaks(memory)

    @property
    def now_s(self) -> float:
        """The virtual clock."""
        return self._engine.now_s

    # ---- inside ----------------------------------------------------------------------------------

    def _alive(self) -> set[int]:
        dead = self._faults.dead if self._faults is not None else set()
        return set(self.ranks) - dead

    def _fold(self, program: Program) -> None:
        if self._num_loads:
            rule = "a folded world plays one program once"
            raise PlanError("plan/illegal", "fold", True, rule, legal=[False])
        cost = self._engine.cost
        outcomes, committed = self._engine.outcomes, self._engine.committed
        self._engine = self._make_engine(colors=equitable_colors(program, cost.rank_class))
        self._engine.outcomes, self._engine.committed = outcomes, committed
        self.ranks = sorted(set(self._engine.matcher.player.tolist()))

    def _addressees(self, action: Action) -> Sequence[int]:
        if action.ranks:
            return [rank for rank in action.ranks if rank in self._members]
        if isinstance(action, Collective) and action.members:
            return [rank for rank in action.members if rank in self._members]
        return self._members

    def _place(self, first: int, roots: Sequence[int], *, decided: bool) -> None:
        if self._faults is not None:
            self._faults.placed(first, roots, decided=decided)
        self._engine.at(self._engine.now_s, partial(self._engine.release, roots))

    def _committed(self, step: int) -> None:
        if step > self._step:
            self._step = step
            if self._faults is not None and not self._num_loads:
                self._faults.stepped(step)

    def _change_membership(self, kind: str, rank: int) -> None:
        if kind == "leave":
            self._members = tuple(member for member in self._members if member != rank)
        else:
            self._members = tuple(sorted({*self._members, rank}))
        self._epoch += 1
        self._engine.events.append(Event(kind=kind, time_s=self._engine.now_s, rank=rank))

    def _refresh_views(self) -> None:
        for view in self._views.values():
            view.members, view.epoch = self._members, self._epoch
            view.step, view.now_s = self._step, self._engine.now_s
