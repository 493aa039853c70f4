"""Actions that a real rank still has to carry out: lanes in order, `after` where one waits.

The graph only; `local` and `dist` carry it out. A label in `after` means the action of the same
batch (one load, one decision) or, where that has none, the latest one of an earlier batch. Decided
actions are forgotten once `KEEP_LABELS` others have ended after them; to wait for one is an error
from then on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from typing import Any

from phalanx.action import Action, Alloc, Collective, Free, Recv, Send, Timer
from phalanx.cost.collectives import wire_bytes
from phalanx.errors import CheckError, nearest_names
from phalanx.mesh import Mesh
from phalanx.policy import Event

KEEP_LABELS = 4096


class Entry:
    """One action of one rank.

    Attributes:
        step: loads up to its own, counted from 1; without any, the steps committed.
        planned: it came with a program, not from a policy.
        waits: how many earlier entries have to end (of some: start) first.
        start, end: moments of the world's clock (None before they come).
        under_way: started, and the world does not wait for its end.
        earlier: transfers that it waited for, until it ends.
        freed_bytes: what a Free gives back.
        work: handle of a transfer whose end only its stream knows (None: it has really ended).
    """

    __slots__ = (
        *("action", "rank", "step", "planned", "waits", "starts", "later", "earlier"),
        *("start", "end", "under_way", "ended", "freed_bytes", "work"),
    )

    def __init__(self, action: Action, rank: int, step: int, planned: bool) -> None:
        self.action, self.rank, self.step, self.planned = action, rank, step, planned
        self.waits = 0
        self.starts: list[Entry] = []  # may start once this has started
        self.later: list[Entry] = []  # may start once this has ended
        self.earlier: list[Entry] = []
        self.under_way, self.ended = False, False
        self.start: Any = None
        self.end: Any = None
        self.freed_bytes = 0.0
        self.work: Any = None

    def __str__(self) -> str:
        name = self.action.label or getattr(self.action, "tensor", "")
        return f"{self.action.operator} {name}".strip()

    @property
    def is_announced(self) -> bool:
        """Whether a policy hears of its end: decided and labelled, or a timer."""
        is_decided = not self.planned and bool(self.action.label)
        return is_decided or isinstance(self.action, Timer)

    def event(self, time_s: float, data: Mapping[str, Any]) -> Event:
        """What a policy hears of its end."""
        kind = "timer" if isinstance(self.action, Timer) else "done"
        label, item = self.action.label, self.action.item
        return Event(kind=kind, time_s=time_s, rank=self.rank, label=label, item=item, data=data)

    def row(self, mesh: Mesh, start_s: float, end_s: float) -> dict[str, Any]:
        """Its trace row."""
        action = self.action
        row = {
            "rank": self.rank,
            "step": self.step,
            "action_id": action.label,
            "item": action.item,
            "layer": action.layer,
            "phase": action.phase,
            "operator": action.operator,
            "lane": action.lane,
            "start_s": start_s,
            "dur_s": end_s - start_s,
            "flops": getattr(action, "flops", 0.0),
            "payload_bytes": getattr(action, "payload_bytes", 0.0),
        }
        if isinstance(action, Alloc):
            row["payload_bytes"] = action.num_bytes
        elif isinstance(action, Free):
            row["payload_bytes"] = self.freed_bytes
        elif isinstance(action, Send | Recv):
            row |= {"axis": action.axis, "peer": mesh.peer(self.rank, action.axis, action.peer)}
            row["wire_bytes"] = action.payload_bytes if isinstance(action, Send) else 0.0
        elif isinstance(action, Collective):
            size = len(action.members) or mesh.degree(action.axis)
            sent = wire_bytes(action.collective, action.payload_bytes, size)
            row |= {"axis": action.axis, "wire_bytes": sent}
        return row


class Pending:
    """The entries of one rank, in order of issue.

    Args:
        rank: global rank.
        traced_steps: steps whose entries are kept for the trace (None: all).

    Attributes:
        ready, ready_transfers: entries that may start.
        open: entries that have not ended.
        num_under_way: those of them that have started and end by themselves.
        kept: entries for the trace.
    """

    def __init__(self, rank: int, traced_steps: Container[int] | None = None) -> None:
        self.rank, self._traced_steps = rank, traced_steps
        self.ready_transfers: deque[Entry] = deque()
        self.ready: deque[Entry] = deque()
        self.open: dict[Entry, None] = {}
        self.kept: list[Entry] = []
        self.num_under_way = 0
        self._tails: dict[Hashable, Entry] = {}  # last entry of a lane, or of what meets in order
        self._labels: dict[str, Entry] = {}
        self._ended_decisions: deque[Entry] = deque()  # labelled ones that may be waited for
        self._taken_bytes: dict[tuple[str, str], deque[float]] = {}  # by (memory, tensor)

    def add(self, actions: Iterable[Action], step: int, *, planned: bool) -> list[Entry]:
        """Queue a batch.

        Raises:
            CheckError: `check/label` for a label that the batch has twice, or one in `after` that
                this rank never had.
        """
        batch = [Entry(action, self.rank, step, planned) for action in actions]
        labels = self._labels_of(batch)
        for entry in batch:
            self._follow_tails(entry)
            for label in entry.action.after:
                self._follow(entry, self._find(entry, label, labels))
            self._note_memory(entry)
        self._labels |= labels
        self.open |= dict.fromkeys(batch)
        if self._traced_steps is None or step in self._traced_steps:
            self.kept += batch
        for entry in batch:
            if not entry.waits:
                self._queue(entry)
        return batch

    def requeue(self, entry: Entry) -> None:
        """A ready entry that could not start is ready again, before all others."""
        (self.ready_transfers if is_transfer(entry.action) else self.ready).appendleft(entry)

    def set_under_way(self, entry: Entry) -> None:
        """An entry has started and ends by itself."""
        entry.under_way = True
        self.num_under_way += 1
        self._release(entry.starts)
        entry.starts = []

    def set_ended(self, entry: Entry) -> None:
        """An entry has ended; what waited only for it is ready."""
        assert not entry.ended
        entry.ended, entry.earlier = True, []
        del self.open[entry]
        self.num_under_way -= entry.under_way
        self._release(entry.starts)
        self._release(entry.later)
        entry.starts, entry.later = [], []
        self._forget_oldest(entry)

    @property
    def num_blocked(self) -> int:
        """Entries that wait for others."""
        num_ready = len(self.ready) + len(self.ready_transfers)
        return len(self.open) - self.num_under_way - num_ready

    def _queue(self, entry: Entry) -> None:
        (self.ready_transfers if is_transfer(entry.action) else self.ready).append(entry)

    def _release(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            entry.waits -= 1
            if not entry.waits:
                self._queue(entry)

    def _labels_of(self, batch: Sequence[Entry]) -> dict[str, Entry]:
        labels: dict[str, Entry] = {}
        for entry in batch:
            if entry.action.label in labels:
                rule = "two actions of one list have this label"
                raise CheckError("check/label", f"rank {self.rank}", entry.action.label, rule)
            if entry.action.label:
                labels[entry.action.label] = entry
        return labels

    def _find(self, entry: Entry, label: str, labels: dict[str, Entry]) -> Entry:
        found = labels.get(label) or self._labels.get(label)
        if found is None:
            legal = nearest_names(label, {**self._labels, **labels})
            rule = f"waits for a label that its rank never had in {KEEP_LABELS} decisions"
            raise CheckError("check/label", f"rank {self.rank}: {entry}", label, rule, legal=legal)
        return found

    def _forget_oldest(self, ended: Entry) -> None:
        """Labels of decisions are new ones for ever, unlike those of programs."""
        if ended.planned or not ended.action.label:
            return
        self._ended_decisions.append(ended)
        if len(self._ended_decisions) > KEEP_LABELS:
            oldest = self._ended_decisions.popleft()
            if self._labels.get(oldest.action.label) is oldest:
                del self._labels[oldest.action.label]

    def _note_memory(self, entry: Entry) -> None:
        """The n-th Free of a tensor gives back what its n-th Alloc took: a list may name the next
        Alloc before the Free that it waits for."""
        action = entry.action
        if isinstance(action, Alloc):
            taken = self._taken_bytes.setdefault((action.memory, action.tensor), deque())
            taken.append(action.num_bytes)
        elif isinstance(action, Free):
            key = (action.memory, action.tensor)
            taken = self._taken_bytes.get(key, deque())
            entry.freed_bytes = taken.popleft() if taken else 0.0
            if not taken:
                self._taken_bytes.pop(key, None)

    def _follow_tails(self, entry: Entry) -> None:
        if isinstance(entry.action, Timer):
            return  # occupies no lane
        before = self._replace_tail(("lane", entry.action.lane), entry)
        if before is not None:
            self._follow(entry, before)
        partner = meeting(entry.action)
        earlier = None if partner is None else self._replace_tail(partner, entry)
        if earlier not in (None, before) and not (earlier.ended or earlier.under_way):
            earlier.starts.append(entry)  # they meet their partners in this order
            entry.waits += 1

    def _replace_tail(self, key: Hashable, entry: Entry) -> Entry | None:
        before = self._tails.get(key)
        self._tails[key] = entry
        return before

    def _follow(self, entry: Entry, before: Entry) -> None:
        if is_transfer(before.action) and (before.work is not None or not before.ended):
            entry.earlier.append(before)
        if not before.ended:
            before.later.append(entry)
            entry.waits += 1


def is_transfer(action: Action) -> bool:
    """Actions that meet other ranks."""
    return isinstance(action, Send | Recv | Collective)


def meeting(action: Action) -> Hashable | None:
    """What meets its partners in order of issue, whatever the lane: a group, a named message."""
    if isinstance(action, Collective):
        return ("group", action.axis, action.members, action.epoch)
    if isinstance(action, Send | Recv):
        return (action.kind, action.axis, action.peer, action.tensor)
    return None
