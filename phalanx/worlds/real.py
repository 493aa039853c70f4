"""What real worlds share: queues of actions, events at quiet moments, a measured trace.

A real world runs everything that can run and reports what happened when it is quiet: nothing is
ready, and nothing waits for what is under way. A transfer that nobody waits for yet stays under way
across reports, which is how an exchange overlaps the next step. Events, addressees and numbers are
those of `sim`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any, Protocol

from phalanx.action import Action, Collective, Compute, Free, Mark, Move, Program, Recv, Send, Timer
from phalanx.errors import CheckError, PlanError, WorldError, nearest_names
from phalanx.mesh import Mesh
from phalanx.policy import Event, View
from phalanx.trace import Trace, TraceBuilder
from phalanx.worlds.pending import Entry, Pending

COMMIT_MARK = "commit"  # Mark(name="commit", value=n): the scope has committed n steps


class Interference(Protocol):
    """What disturbs a world: `faulty.FaultyWorld`."""

    def hold_s(self, entry: Entry) -> float:
        """Seconds that a ready entry must not start for (0: it may start, inf: it never will)."""
        ...

    def after_compute(self, entry: Entry) -> None:
        """A compute has run; it may take longer."""
        ...

    def copies(self, entry: Entry) -> int:
        """How often a message that is about to be sent arrives."""
        ...

    def blame(self, detail: str) -> Exception | None:
        """The error about actions that can never happen; None when no fault explains it."""
        ...


class RealWorld(ABC):
    """Base of `LocalWorld` and `DistWorld`.

    Args:
        mesh: the grid of the job.
        ranks: those that this process plays.
        ops: name -> callable(context, action); what it returns is the `data` of the action's event.
        facts: what the views of React policies show.
        job: name of the job.
        traced_steps: steps whose actions the trace keeps (None: all).
    """

    def __init__(
        self,
        mesh: Mesh,
        ranks: Sequence[int],
        ops: Mapping[str, Callable[..., Mapping[str, Any] | None]],
        *,
        facts: Mapping[str, Any] | None = None,
        job: str = "",
        traced_steps: Container[int] | None = None,
    ) -> None:
        self.mesh, self.ranks, self.ops, self.job = mesh, ranks, ops, job
        self.facts = dict(facts or {})
        self.lowest = min(ranks)
        self.pending = {rank: Pending(rank, traced_steps) for rank in ranks}
        self.views: dict[str, View] = {}
        self._num_loads = self._num_commits = 0
        self._started = False
        self.interference: Interference | None = None
        self._events: list[Event] = []
        self._open_of_step: dict[int, int] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_number = count()
        self.origin_s = time.perf_counter()

    # ---- the protocol ----------------------------------------------------------------------------

    def view(self, scope: str) -> View:
        """The live view of a scope; every scope has all ranks as members here."""
        if scope not in self.views:
            members = tuple(range(self.mesh.size))
            self.views[scope] = View(mesh=self.mesh, members=members, facts=self.facts)
        return self.views[scope]

    def load(self, program: Program) -> None:
        """Queue one step.

        Raises:
            PlanError: `plan/illegal` for another mesh.
            WorldError: `world/unbound` for an op that this world does not have.
            CheckError: `check/label` for labels that are doubled or missing.
            JobError: `mesh/axis`, `mesh/rank` for an axis or a peer that the mesh does not have.
        """
        if program.mesh != self.mesh:
            rule = "the program is for another mesh than this world's"
            raise PlanError("plan/illegal", "program.mesh", program.mesh, rule, legal=[self.mesh])
        for actions in {program.list_of_rank[r]: program.of(r) for r in self.ranks}.values():
            self._require_legal(actions)
        self._num_loads = step = self._num_loads + 1
        for rank in self.ranks:
            batch = self.pending[rank].add(program.of(rank), step, planned=True)
            if rank == self.lowest:
                self._open_of_step[step] = len(batch)
        if not self._open_of_step[step]:
            self._end_step(step)

    def issue(self, actions: Sequence[Action]) -> None:
        """Queue decided actions; errors as in `load`."""
        self._require_legal(actions)
        step = max(self._num_loads, self._num_commits)
        for rank, queue in self.pending.items():
            own = [action for action in actions if _is_for(action, rank)]
            queue.add(own, step, planned=False)

    def agree(self, scope: str, decide: Callable[[], list[Action]]) -> list[Action]:
        """The decision of the scope's leader."""
        return decide()

    def next_events(self) -> list[Event]:
        """Run until it is quiet; what happened, or [] when nothing ever will."""
        if not self._started:
            self._started = True
            return [Event(kind="start", time_s=self.now_s)]
        self._run()
        events, self._events = self._events, []
        for view in self.views.values():
            view.now_s = self.now_s
        return events

    def close(self) -> Trace:
        """The rows of what has ended, rank by rank in order of issue."""
        builder = TraceBuilder("measured", self.job)
        for queue in self.pending.values():
            for entry in queue.kept:
                if entry.ended:
                    moments = (entry.start, entry.end)
                    times = [self.seconds(moment) - self.origin_s for moment in moments]
                    builder.add(**entry.row(self.mesh, *times))
        return builder.build()

    # ---- what a world decides --------------------------------------------------------------------

    @abstractmethod
    def context(self, rank: int) -> Any:
        """The first argument of an op, with `move` and `free` for those actions."""

    @abstractmethod
    def start_transfers(self, pending: Pending) -> None:
        """Start everything in `pending.ready_transfers`."""

    @abstractmethod
    def await_transfer(self, until_s: float | None) -> bool:
        """Wait until a transfer that is under way has ended, or until `until_s` by
        `time.perf_counter`; False when none can end. The world calls `end` for what has ended."""

    @abstractmethod
    def end_transfers(self) -> None:
        """Call `end` for the transfers that have ended by now; waits for none."""

    @abstractmethod
    def await_earlier(self, entry: Entry) -> None:
        """Make the transfers that `entry` waited for visible to it, where their end is not."""

    def now(self) -> Any:
        """A moment for the trace."""
        return time.perf_counter()

    def seconds(self, moment: Any) -> float:
        """A moment by `time.perf_counter`."""
        return moment

    # ---- running ---------------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        """Seconds since this world was made."""
        return time.perf_counter() - self.origin_s

    def end(self, entry: Entry, data: Mapping[str, Any] | None = None) -> None:
        """An entry has ended."""
        if entry.end is None:
            entry.end = self.now()
        self.pending[entry.rank].set_ended(entry)
        if entry.is_announced:
            self._events.append(entry.event(self.now_s, data or {}))
        if entry.planned and entry.rank == self.lowest:
            self._open_of_step[entry.step] -= 1
            if not self._open_of_step[entry.step]:
                self._end_step(entry.step)

    def _end_step(self, step: int) -> None:
        del self._open_of_step[step]
        event = Event(kind="step", time_s=self.now_s, rank=self.lowest, item=step)
        self._events.append(event)

    def _run(self) -> None:
        while True:
            self._run_ready()
            self._end_timers()
            queues = self.pending.values()
            if any(queue.ready or queue.ready_transfers for queue in queues):
                continue
            is_blocked = any(queue.num_blocked for queue in queues)
            if self._events and not is_blocked:
                return
            due_s = self._timers[0][0] if self._timers else None
            if self.await_transfer(due_s):
                continue
            if due_s is not None:
                time.sleep(max(0.0, due_s - time.perf_counter()))
                continue
            if not self._events and any(queue.open for queue in queues):
                raise self._stuck()
            return

    def _run_ready(self) -> None:
        for pending in self.pending.values():
            while pending.ready or pending.ready_transfers:
                self.end_transfers()  # a compute takes long: what they held up must not wait for it
                if pending.ready_transfers:
                    self.start_transfers(pending)
                else:
                    self._carry_out(pending.ready.popleft())

    def _carry_out(self, entry: Entry) -> None:
        if self.is_held(entry):
            return
        action = entry.action
        self.await_earlier(entry)
        entry.start = self.now()
        if isinstance(action, Timer):
            self.pending[entry.rank].set_under_way(entry)
            due_s = time.perf_counter() + action.delay_s
            self._call_at(due_s, partial(self.end, entry))
        elif isinstance(action, Compute):
            data = self._compute(entry, action)
            self.end(entry, data)
        else:
            if isinstance(action, Mark):
                self._mark(action)
            elif isinstance(action, Move):
                self.context(entry.rank).move(action)
            elif isinstance(action, Free):
                self.context(entry.rank).free(action)
            self.end(entry)

    def _compute(self, entry: Entry, action: Compute) -> Mapping[str, Any] | None:
        data = self.ops[action.op](self.context(entry.rank), action)
        if self.interference is not None:
            self.interference.after_compute(entry)
        return data

    def is_held(self, entry: Entry) -> bool:
        """Whether a fault keeps a ready entry from starting now; then it is queued again later."""
        if self.interference is None:
            return False
        until_s = self.interference.hold_s(entry)
        if until_s <= 0:
            return False
        if until_s < inf:
            retry = partial(self.pending[entry.rank].requeue, entry)
            self._call_at(time.perf_counter() + until_s, retry)
        return True

    def _call_at(self, due_s: float, call: Callable[[], None]) -> None:
        heappush(self._timers, (due_s, next(self._timer_number), call))

    def _mark(self, action: Mark) -> None:
        if action.name == COMMIT_MARK:
            self._num_commits = max(self._num_commits, int(action.value))
            for view in self.views.values():
                view.step = self._num_commits

    def _stuck(self) -> Exception:
        detail = describe_open(self.pending)
        error = None if self.interference is None else self.interference.blame(detail)
        rule = "actions are left and none of them can ever happen"
        return error or CheckError("check/deadlock", "program", None, rule, detail=detail)

    def _end_timers(self) -> None:
        while self._timers and self._timers[0][0] <= time.perf_counter():
            heappop(self._timers)[2]()

    def _require_legal(self, actions: Sequence[Action]) -> None:
        for action in actions:
            where = f"action {action.label or action.operator}"
            if isinstance(action, Compute) and action.op not in self.ops:
                legal = nearest_names(action.op, self.ops)
                rule = "no op of that name is bound"
                raise WorldError("world/unbound", where, repr(action.op), rule, legal=legal)
            if isinstance(action, Send | Recv) or (
                isinstance(action, Collective) and not action.members
            ):
                self.mesh.require_axis(action.axis, f"axis of {where}")
            if isinstance(action, Send | Recv):
                self.mesh.rank({action.axis: action.peer})  # raises for a coordinate outside


def _is_for(action: Action, rank: int) -> bool:
    """Whether a decided action is carried out by `rank`."""
    if action.ranks:
        return rank in action.ranks
    if isinstance(action, Collective) and action.members:
        return rank in action.members
    return True


def describe_open(pending: Mapping[int, Pending], num_ranks: int = 8) -> str:
    """The first open entries of each rank, one line per rank, for errors."""
    lines: list[str] = []
    for rank, queue in pending.items():
        heads = [f"{'waits in' if e.under_way else 'before'} {e}" for e in list(queue.open)[:3]]
        if heads and len(lines) < num_ranks:
            lines.append(f"  rank {rank}: {', '.join(heads)}")
    return "\n".join(lines)
