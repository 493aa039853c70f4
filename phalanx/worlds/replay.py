"""A recorded run as a world: its durations under another program, its events under a policy again.

Two questions to a recording
- `ReplayWorld`: what would this program take if every action took as long as it did then? A trace
  holds for each member of a collective, and for both ends of a message, the time from its own
  arrival; the shortest of them is the transfer itself, the rest was waiting, which the replay
  computes anew.
- `RecordingWorld` around any world keeps what policies heard and decided; `EventReplay` tells the
  same to policies again and demands the same decisions. A React policy that looks at anything but
  its events and view is found out here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from phalanx.action import Action, Collective, Compute, Move, Program, Send
from phalanx.errors import WorldError, nearest_names
from phalanx.mesh import Mesh
from phalanx.policy import Event, View
from phalanx.trace import Trace
from phalanx.worlds.action_json import actions_to_json
from phalanx.worlds.base import World
from phalanx.worlds.sim import SimWorld

RECORDING = "recording"  # key in the notes of a trace


class ReplayCost:
    """Durations of a trace as prices.

    A price is the mean over the steps of the trace for (rank, action_id), where the action has a
    label that was recorded; else the mean over its operator on that rank; else over its operator on
    all ranks.

    Args:
        trace: simulated or measured, with operator rows.

    Raises:
        WorldError: `world/unbound` when asked for an operator that the trace does not have.
    """

    def __init__(self, trace: Trace) -> None:
        sums: dict[tuple[object, ...], list[float]] = {}
        columns = [trace.column(name).tolist() for name in ("rank", "action_id", "operator")]
        for rank, action_id, operator, dur_s in zip(*columns, trace.columns["dur_s"].tolist()):
            keys: list[tuple[object, ...]] = [("operator", operator), (rank, operator)]
            if action_id:
                keys.append((rank, operator, action_id))
            for key in keys:
                total = sums.setdefault(key, [0.0, 0.0])
                total[0] += dur_s
                total[1] += 1
        self._mean_s = {key: total / count for key, (total, count) in sums.items()}

    def _price(self, action: Action, rank: int) -> float:
        operator = action.operator
        for key in ((rank, operator, action.label), (rank, operator), ("operator", operator)):
            if key in self._mean_s:
                return self._mean_s[key]
        known = [str(key[1]) for key in self._mean_s if key[0] == "operator"]
        raise WorldError(
            "world/unbound",
            f"rank {rank}: {action.label or operator}",
            repr(operator),
            "the recording has no such operator",
            legal=nearest_names(operator, known),
        )

    def compute_s(self, action: Compute, rank: int) -> float:
        """Recorded time of the compute."""
        return self._price(action, rank)

    def collective_s(self, action: Collective, members: Sequence[int]) -> float:
        """The shortest time of all members: that of the one that came last."""
        return min(self._price(action, member) for member in members)

    def transfer_s(self, action: Send, source: int, target: int) -> float:
        """Recorded time of the send."""
        return self._price(action, source)

    def transfer_latency_s(self, action: Send, source: int, target: int) -> float:
        """Nothing is known of a recorded message's parts: none of it shares a link."""
        return self._price(action, source)

    def move_s(self, action: Move, rank: int) -> float:
        """Recorded time of the copy."""
        return self._price(action, rank)

    def rank_class(self, rank: int) -> Hashable:
        """Every rank was measured by itself."""
        return rank


class ReplayWorld(SimWorld):
    """A mesh in virtual time where actions take as long as they did in a trace.

    Args:
        mesh: the grid.
        trace: what was recorded.
        options: as for `SimWorld`.
    """

    def __init__(self, mesh: Mesh, trace: Trace, **options: Any) -> None:
        super().__init__(mesh, ReplayCost(trace), **options)


class RecordingWorld:
    """Any world, keeping what policies hear and decide in the notes of its trace.

    Facts and event data must be what JSON knows (arrays become lists); `EventReplay` gives them
    back as such.
    """

    def __init__(self, world: World) -> None:
        self.world, self.mesh, self.ranks = world, world.mesh, world.ranks
        self._views: dict[str, View] = {}
        self._batches: list[dict[str, Any]] = []
        self._starts: dict[str, dict[str, Any]] = {}

    def view(self, scope: str) -> View:
        """The world's view; its first state is what a policy starts from."""
        self._views[scope] = self.world.view(scope)
        self._starts.setdefault(scope, _view_to_json(self._views[scope]))
        return self._views[scope]

    def load(self, program: Program) -> None:
        """As the world does."""
        self.world.load(program)

    def issue(self, actions: Sequence[Action]) -> None:
        """As the world does."""
        self.world.issue(actions)

    def agree(self, scope: str, decide: Callable[[], list[Action]]) -> list[Action]:
        """As the world does; kept with the events that led to it."""
        actions = self.world.agree(scope, decide)
        decided = {"scope": scope, "actions": _plain(actions_to_json(actions))}
        self._batches[-1]["decided"].append(decided)
        return actions

    def next_events(self) -> list[Event]:
        """As the world does; kept with the views at that moment."""
        events = self.world.next_events()
        views = {scope: _view_to_json(view) for scope, view in self._views.items()}
        kept = [_plain(asdict(event)) for event in events]
        self._batches.append({"events": kept, "views": views, "decided": []})
        return events

    def close(self) -> Trace:
        """The world's trace with the recording in its notes."""
        trace = self.world.close()
        recording = {"views": self._starts, "batches": self._batches}
        notes = {**trace.notes, RECORDING: recording}
        return Trace(trace.source, trace.job, trace.columns, trace.vocabulary, notes)


class EventReplay:
    """The policies' side of a recorded run: `drive(EventReplay(mesh, trace), reacts=[...])`.

    Policies hear the recorded events with the recorded views; the same policies must decide the
    same in the same order. Programs are not loaded.

    Args:
        mesh: the grid.
        trace: of a `RecordingWorld`, also loaded from a file.

    Raises:
        WorldError: `world/unbound` for a trace without a recording.
    """

    def __init__(self, mesh: Mesh, trace: Trace) -> None:
        if RECORDING not in trace.notes:
            rule = "was not recorded; run it in a RecordingWorld"
            raise WorldError("world/unbound", f"trace {trace.job}".strip(), None, rule)
        self.mesh = mesh
        self.ranks: Sequence[int] = range(mesh.size)
        self._trace = trace
        self._recording = trace.notes[RECORDING]
        self._at = -1
        self._asked = 0
        self._views: dict[str, View] = {}

    def view(self, scope: str) -> View:
        """The view as it was recorded, kept up to date by `next_events`."""
        if scope not in self._recording["views"]:
            known = sorted(self._recording["views"])
            rule = "nobody asked for this scope when it was recorded"
            raise WorldError("world/unbound", "scope", repr(scope), rule, legal=known)
        view = self._views.setdefault(scope, View(mesh=self.mesh))
        _set_view(view, self._recording["views"][scope])
        return view

    def load(self, program: Program) -> None:
        """Nothing: the events of the program are in the recording."""

    def issue(self, actions: Sequence[Action]) -> None:
        """Nothing: what follows is in the recording."""

    def agree(self, scope: str, decide: Callable[[], list[Action]]) -> list[Action]:
        """The decision, if it is the recorded one.

        Raises:
            WorldError: `world/failed` naming the moment and the first action that differs.
        """
        actions = decide()
        decided = self._recording["batches"][self._at]["decided"]
        before = decided[self._asked]["actions"] if self._asked < len(decided) else []
        self._asked += 1
        now = _plain(actions_to_json(actions))
        for at in range(max(len(now), len(before))):
            one, other = now[at : at + 1], before[at : at + 1]
            if one != other:
                heard = [event["kind"] for event in self._recording["batches"][self._at]["events"]]
                where = f"scope {scope}, events {self._at} ({', '.join(heard)}), action {at}"
                rule = "another decision than the recorded one"
                detail = f"  recorded: {_shown(other)}\n  now:      {_shown(one)}"
                raise WorldError("world/failed", where, None, rule, detail=detail)
        return actions

    def next_events(self) -> list[Event]:
        """The next recorded batch."""
        batches = self._recording["batches"]
        self._at, self._asked = self._at + 1, 0
        if self._at >= len(batches):
            return []
        for scope, values in batches[self._at]["views"].items():
            if scope in self._views:
                _set_view(self._views[scope], values)
        return [Event(**event) for event in batches[self._at]["events"]]

    def close(self) -> Trace:
        """The recorded trace."""
        return self._trace


def _shown(action: Sequence[Mapping[str, Any]]) -> str:
    return f"{action[0]['kind']} {action[0]['fields']}" if action else "nothing"


def _view_to_json(view: View) -> dict[str, Any]:
    values = {name: getattr(view, name) for name in ("members", "epoch", "step", "now_s", "facts")}
    return _plain(values)


def _set_view(view: View, values: Mapping[str, Any]) -> None:
    view.members = tuple(values["members"])
    view.epoch, view.step, view.now_s = values["epoch"], values["step"], values["now_s"]
    view.facts = values["facts"]


def _plain(value: Any) -> Any:
    """A copy in JSON's types, so that a recording is the same in memory and from a file."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value
