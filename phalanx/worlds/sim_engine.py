"""The event loop of the simulator: entries start, take their time, end, and let others start.

It knows nothing of policies and traces. The calendar holds one bucket of entries for each moment at
which something ends, so events of one moment (most of them, on ranks that behave alike) share one
heap operation, and everything of one moment is over before a policy hears of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from math import inf
from typing import Protocol

import numpy as np

from phalanx.action import Action, Alloc, Collective, Free, Mark, Recv, Send, Timer
from phalanx.cost.base import CostModel
from phalanx.errors import CheckError
from phalanx.mesh import Mesh
from phalanx.policy import Event
from phalanx.worlds.sim_links import Links, SharedLink
from phalanx.worlds.sim_load import Loader
from phalanx.worlds.sim_match import Matcher
from phalanx.worlds.sim_memory import MemoryAccount
from phalanx.worlds.sim_table import SEND, Table

Outcome = Callable[[Action, Event], Sequence[Event]]


class Interference(Protocol):
    """What may come between entries that meet (`sim_faults`); a call per meeting, none without."""

    def turned_away(self, entry: int) -> bool:
        """Whether an arriving entry must not meet: the interference deals with it."""
        ...

    def held(self, entries: Sequence[int]) -> bool:
        """Whether entries that have met must not start now: the interference starts them later."""
        ...

    def tripped(self, entry: int) -> None:
        """Start an entry whose kind is TRIP."""
        ...


class Engine:
    """All ranks of a mesh in virtual time.

    Args:
        mesh: the grid.
        cost: prices.
        colors: color of each rank; one rank plays all of its color (None: no folding).
        links: links that messages share.
        memory: account of what is held (None: Alloc and Free only take their turn).
        pair_channels: see `compile_list`.

    Attributes:
        events: notices since the last call of `run`.
        present: collective -> entries that have arrived.
        waiting: channel -> sends without a receive, or receives without a send.
        freed_bytes: entry of a Free -> bytes.
        hung: entries that started but can never end.
    """

    def __init__(
        self,
        mesh: Mesh,
        cost: CostModel,
        *,
        colors: np.ndarray | None = None,
        links: Links | None = None,
        memory: MemoryAccount | None = None,
        pair_channels: bool = False,
    ) -> None:
        self.mesh, self.cost, self.links = mesh, cost, links
        self.table = Table()
        self.matcher = Matcher(mesh, colors)
        self.loader = Loader(self.table, self.matcher, cost, pair_channels=pair_channels)
        self.memory = memory
        self.now_s = 0.0
        self.events: list[Event] = []
        self.present: dict[int, list[int]] = {}
        self.waiting: dict[int, list[int]] = {}
        self.freed_bytes: dict[int, float] = {}
        self.hung: set[int] = set()
        self.interference: Interference | None = None
        self.outcomes: Mapping[str, Outcome] = {}
        self.committed: Callable[[int], None] = lambda step: None
        self.calendar: dict[float, list[int]] = {}
        self._times: list[float] = []
        self._hooks: dict[int, Callable[[], None]] = {}
        self._num_hooks = 0
        self._shared: dict[str, SharedLink] = {}
        # By entry kind, in the order of sim_table.
        self._starters: tuple[Callable[[int], None], ...] = (
            *(self._start_local, self._arrive_collective, self.arrive_message),
            *(self.arrive_message, self._start_memory, self._notify, self._end_step),
            *(self._commit, self._trip, self._skip),
        )

    # ---- the clock -------------------------------------------------------------------------------

    def run(self) -> None:
        """Let time pass until something is noticed or nothing is left to happen."""
        table, calendar, times, hooks = self.table, self.calendar, self._times, self._hooks
        waits, succ, kinds, starters = table.waits, table.succ, table.kind, self._starters
        start_s, dur_s = table.start_s, table.dur_s
        while times and not self.events:
            now_s = self.now_s = times[0]
            for entry in calendar[now_s]:  # grows while we walk: zero durations end in it
                if entry < 0:
                    hooks.pop(entry)()
                    continue
                following, succ[entry] = succ[entry], None
                for distance in following or ():
                    later = entry + distance
                    waits[later] -= 1
                    if waits[later]:
                        continue
                    if kinds[later]:
                        starters[kinds[later]](later)
                        continue
                    # _start_local, written out: half of all events pass here
                    start_s[later] = now_s
                    end_s = now_s + dur_s[later]
                    if end_s in calendar:
                        calendar[end_s].append(later)
                    else:
                        calendar[end_s] = [later]
                        heappush(times, end_s)
            del calendar[heappop(times)]

    def at(self, time_s: float, hook: Callable[[], None]) -> None:
        """Call `hook` at `time_s`, after what was scheduled for that moment before."""
        self._num_hooks -= 1
        self._hooks[self._num_hooks] = hook
        self.schedule(time_s, (self._num_hooks,))

    def reschedule(self, entry: int, later_s: float) -> None:
        """Let an entry that has started end `later_s` later than planned (inf: never)."""
        start_s, dur_s = self.table.start_s[entry], self.table.dur_s
        self.calendar[start_s + dur_s[entry]].remove(entry)
        if later_s == inf:
            dur_s[entry] = self.now_s - start_s
            self.hung.add(entry)
        else:
            dur_s[entry] += later_s
            self.schedule(start_s + dur_s[entry], (entry,))

    def schedule(self, time_s: float, entries: Sequence[int]) -> None:
        """Entries end at `time_s`."""
        if time_s in self.calendar:
            self.calendar[time_s].extend(entries)
        else:
            self.calendar[time_s] = list(entries)
            heappush(self._times, time_s)

    def release(self, entries: Sequence[int]) -> None:
        """Take one thing to wait for from each entry; start those that wait for nothing more."""
        waits, kinds = self.table.waits, self.table.kind
        for entry in entries:
            waits[entry] -= 1
            if not waits[entry]:
                self._starters[kinds[entry]](entry)

    def launch(self, entries: Sequence[int], seconds: float) -> None:
        """Entries start together now and end together `seconds` later."""
        start_s, dur_s = self.table.start_s, self.table.dur_s
        for entry in entries:
            start_s[entry] = self.now_s
            dur_s[entry] = seconds
        self.schedule(self.now_s + seconds, entries)

    # ---- entries that need nobody else -----------------------------------------------------------

    def _start_local(self, entry: int) -> None:
        self.launch((entry,), self.table.dur_s[entry])

    def _start_memory(self, entry: int) -> None:
        action, rank = self.table.action(entry), self.table.rank[entry]
        if self.memory is not None and isinstance(action, Alloc):
            self.memory.alloc(action, rank)
        elif self.memory is not None and isinstance(action, Free):
            self.freed_bytes[entry] = self.memory.free(action, rank)
        self.launch((entry,), 0.0)

    def _notify(self, entry: int) -> None:
        action = self.table.action(entry)
        kind = "timer" if isinstance(action, Timer) else "done"
        rank = self.table.rank[entry]
        self.table.succ[entry] = None
        event = Event(kind=kind, time_s=self.now_s, rank=rank, label=action.label, item=action.item)
        if action.operator in self.outcomes:
            self.events.extend(self.outcomes[action.operator](action, event))
        else:
            self.events.append(event)

    def _end_step(self, entry: int) -> None:
        rank, step = self.table.rank[entry], self.table.step[entry]
        self.table.succ[entry] = None
        self.events.append(Event(kind="step", time_s=self.now_s, rank=rank, item=step))

    def _commit(self, entry: int) -> None:
        action = self.table.action(entry)
        assert isinstance(action, Mark)
        self.launch((entry,), 0.0)
        self.committed(int(action.value))

    def _skip(self, entry: int) -> None:
        self.schedule(self.now_s, (entry,))

    def _trip(self, entry: int) -> None:
        assert self.interference is not None
        self.interference.tripped(entry)

    # ---- entries that meet others ----------------------------------------------------------------

    def _arrive_collective(self, entry: int) -> None:
        if self.interference is not None and self.interference.turned_away(entry):
            return
        key = self.table.key[entry]
        present = self.present.setdefault(key, [])
        present.append(entry)
        if len(present) == self.matcher.size(key):
            del self.present[key]
            self._require_alike(present)
            self.start_collective(present)

    def start_collective(self, entries: Sequence[int]) -> None:
        """All members of a collective are there."""
        if self.interference is not None and self.interference.held(entries):
            return
        action = self.table.action(entries[0])
        assert isinstance(action, Collective)
        members = self.matcher.members(action, self.table.rank[entries[0]])
        self.launch(entries, self.cost.collective_s(action, members))

    def _require_alike(self, entries: Sequence[int]) -> None:
        which = self.table.which
        if len({which[entry] for entry in entries}) == 1:
            return
        by_kind: dict[str, list[int]] = {}
        for entry in entries:
            by_kind.setdefault(self.table.action(entry).operator, []).append(entry)
        if len(by_kind) == 1:
            return
        (one, its), (other, others) = list(by_kind.items())[:2]
        ranks = [self.table.rank[each[0]] for each in (its, others)]
        names = [self.table.action(each[0]).label or "no label" for each in (its, others)]
        raise CheckError(
            "check/collective",
            f"ranks {ranks[0]} and {ranks[1]}",
            f"{one} ({names[0]}) and {other} ({names[1]})",
            "members of a group disagree on the next collective",
        )

    def arrive_message(self, entry: int) -> None:
        """A send or a receive is there; the oldest of the other side on its channel is its mate."""
        if self.interference is not None and self.interference.turned_away(entry):
            return
        key, kinds = self.table.key[entry], self.table.kind
        queue = self.waiting.get(key)
        if queue is None:
            self.waiting[key] = [entry]
        elif kinds[queue[0]] == kinds[entry]:
            queue.append(entry)
        else:
            mate = queue.pop(0)
            if not queue:
                del self.waiting[key]
            pair = (entry, mate) if kinds[entry] == SEND else (mate, entry)
            self._require_same_size(*pair)
            self.start_message(pair)

    def start_message(self, pair: Sequence[int]) -> None:
        """A send and its receive are there."""
        if self.interference is not None and self.interference.held(pair):
            return
        send = self.table.action(pair[0])
        assert isinstance(send, Send)
        source, target = self.matcher.ends(self.table.key[pair[0]])
        seconds = self.cost.transfer_s(send, source, target)
        name = None if self.links is None else self.links.link_of(source, target)
        if self.links is None or name is None:
            self.launch(pair, seconds)
            return
        if name not in self._shared:
            self._shared[name] = SharedLink(self, self.links.width.get(name, 1.0))
        latency_s = self.cost.transfer_latency_s(send, source, target)
        for entry in pair:
            self.table.start_s[entry] = self.now_s
        done = partial(self._through, pair)
        add = partial(self._shared[name].add, seconds - latency_s, done)
        self.at(self.now_s + latency_s, add)

    def _through(self, pair: Sequence[int]) -> None:
        """A message has left its shared link."""
        if not self.hung.isdisjoint(pair):
            return
        for entry in pair:
            self.table.dur_s[entry] = self.now_s - self.table.start_s[entry]
        self.schedule(self.now_s, pair)

    def _require_same_size(self, send: int, recv: int) -> None:
        table = self.table
        if table.which[send] == table.which[recv]:
            return
        sent, received = table.action(send), table.action(recv)
        assert isinstance(sent, Send) and isinstance(received, Recv)
        if sent.payload_bytes == received.payload_bytes:
            return
        raise CheckError(
            "check/size",
            f"rank {table.rank[send]}: {sent.label or sent.operator}",
            sent.payload_bytes,
            f"rank {table.rank[recv]} receives it as {received.payload_bytes} bytes",
            legal=[received.payload_bytes],
        )
