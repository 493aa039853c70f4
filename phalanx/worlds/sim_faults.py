"""How a fault script comes true in virtual time.

The loop of the engine knows nothing of it: a pause is one more thing to wait for, a dead rank waits
for ever, a slow rank has other durations. Only where ranks meet does the engine ask.

A fault of a moment strikes before what ends at that moment. A collective or message that has met
but must not start yet (a paused member, a partition) starts as soon as it may. When a rank dies,
what it was in the middle of with others never ends: planned actions hang, and the run ends with an
error unless no live rank depends on them; decided actions (those that a policy issued) are given up
at the `leave` event, and so is every decided action that waits for them by label, all without a
"done". Messages on a shared link are not paused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf, prod

from phalanx.action import Collective, Compute, Recv, Send
from phalanx.worlds.faults import Fault, FaultScript
from phalanx.worlds.sim_engine import Engine
from phalanx.worlds.sim_table import COLLECTIVE, NETWORK, NOTIFY, RECV, SEND, SKIP, STEP, TRIP

_LOST = 1 << 40  # more than any number of predecessors


class Faults:
    """A fault script on an engine.

    Args:
        engine: what it disturbs.
        script: what happens.
        membership: called with ("leave" or "join", rank) when the others learn of it.

    Attributes:
        dead: ranks that do nothing.
        lost_messages: descriptions of dropped messages.
        stalled: entries that met and may never start.
    """

    def __init__(
        self, engine: Engine, script: FaultScript, membership: Callable[[str, int], None]
    ) -> None:
        script.require_ranks(engine.mesh.size)
        self.engine, self.script = engine, script
        self.dead: set[int] = set()
        self.lost_messages: list[str] = []
        self.stalled: list[Sequence[int]] = []
        self._membership = membership
        self._gone: set[int] = set()
        self._paused: dict[int, float] = {}
        self._pauses: dict[int, list[list[int]]] = {}
        self._slowed: dict[int, list[float]] = {}
        self._cuts: list[tuple[frozenset[int], float]] = []
        self._mishaps: dict[int, list[tuple[str, float]]] = {}
        self._trips: dict[int, tuple[int, list[tuple[Fault, int]]]] = {}
        self._struck: set[tuple[int, int]] = set()
        self._decided: set[int] = set()
        self._strikes: dict[str, Callable[[Fault, Sequence[int]], None]] = {
            "kill": self._kill,
            "restart": self._restart,
            "pause": self._pause,
            "slow": self._slow,
            "partition": self._partition,
            "drop": self._misdeliver,
            "duplicate": self._misdeliver,
        }
        engine.interference = self
        for fault in script.faults:
            if fault.at_s is not None:
                engine.at(fault.at_s, partial(self._strike, fault, fault.ranks))

    def blame(self) -> str:
        """What keeps live ranks waiting for ever other than a dead rank; "" for nothing."""
        if self.lost_messages:
            return f"a message was lost: {self.lost_messages[0]}"
        if any(over_s == inf for _, over_s in self._cuts) and self.stalled:
            return "a partition never heals"
        paused = [rank for rank, until_s in self._paused.items() if until_s == inf]
        return f"rank {paused[0]} is paused for good" if paused else ""

    # ---- moments ---------------------------------------------------------------------------------

    def placed(self, first: int, roots: Iterable[int], *, decided: bool) -> None:
        """Entries from `first` on are new; call before they are released."""
        table = self.engine.table
        if decided:
            self._decided.update(range(first, len(table)))
        for entry in range(first, len(table)):
            rank = table.rank[entry]
            if rank in self.dead:
                table.waits[entry] += _LOST
                table.succ[entry] = None
            elif rank in self._pauses:
                self._pauses[rank][-1].append(entry)
                table.waits[entry] += 1
        for rank in self._slowed:
            self._reprice(rank)
        self._set_trips(first, roots)

    def _set_trips(self, first: int, roots: Iterable[int]) -> None:
        table, find = self.engine.table, self.engine.loader.find
        for number, fault in enumerate(self.script.faults):
            if fault.at_label:
                found = [(find(rank, fault.at_label), rank) for rank in fault.ranks]
                hits = [(at, rank) for at, rank in found if at is not None and at >= first]
            elif fault.at_step is not None:
                hits = [
                    (at, table.rank[at])
                    for at in roots
                    if table.rank[at] in fault.ranks
                    and at not in self._decided
                    and table.kind[at] != STEP
                    and table.step[at] > fault.at_step
                ]
            else:
                continue
            for at, rank in hits:
                if (number, rank) not in self._struck:
                    self._trips.setdefault(at, (table.kind[at], []))[1].append((fault, rank))
                    table.kind[at] = TRIP

    def tripped(self, entry: int) -> None:
        """An entry that a fault waits for is about to start."""
        table = self.engine.table
        table.kind[entry], faults = self._trips.pop(entry)
        table.waits[entry] = 1  # not begun: what strikes now may keep it
        for fault, rank in faults:
            self._strike_once(fault, rank)
        self.engine.release((entry,))

    def stepped(self, step: int) -> None:
        """All ranks have done `step` steps, where no program counts them."""
        for fault in self.script.faults:
            if fault.at_step is not None and step >= fault.at_step:
                for rank in fault.ranks:
                    self._strike_once(fault, rank)

    def _strike_once(self, fault: Fault, rank: int) -> None:
        number = self.script.faults.index(fault)
        if (number, rank) in self._struck:
            return
        together = fault.ranks if fault.kind == "partition" else (rank,)
        self._struck.update((number, each) for each in together)
        self._strike(fault, together)

    def _strike(self, fault: Fault, ranks: Sequence[int]) -> None:
        self._strikes[fault.kind](fault, ranks)

    # ---- what strikes ----------------------------------------------------------------------------

    def _open_entries(self, rank: int) -> list[int]:
        succ = self.engine.table.succ
        spans = self.engine.loader.entries_of.get(rank, [])
        return [entry for span in spans for entry in span if succ[entry] is not None]

    def _kill(self, fault: Fault, ranks: Sequence[int]) -> None:
        table = self.engine.table
        for rank in ranks:
            if rank in self.dead:
                continue
            self.dead.add(rank)
            for entry in self._open_entries(rank):
                if table.waits[entry]:
                    table.waits[entry] += _LOST
                elif table.start_s[entry] >= 0:
                    self._cut(entry)
                else:
                    self._withdraw(entry)
                self.engine.hung.discard(entry)
                table.succ[entry] = None
            if self.engine.memory is not None:
                self.engine.memory.clear(rank)
            self._pass_on_notices(rank)
            self.engine.at(self.engine.now_s + self.script.detect_s, partial(self._leave, rank))

    def _pass_on_notices(self, rank: int) -> None:
        """Another rank announces the ends of steps in place of a dead one."""
        table, loader = self.engine.table, self.engine.loader
        alive = [each for each in range(self.engine.mesh.size) if each not in self.dead]
        for notice in list(loader.step_notices):
            if table.rank[notice] == rank and table.succ[notice] is not None:
                table.succ[notice] = None
                table.waits[notice] += _LOST
                fresh = loader.announce_step(table.step[notice], alive)
                self.engine.at(self.engine.now_s, partial(self.engine.release, fresh))

    def _cut(self, entry: int) -> None:
        """A running entry and its partners will never end."""
        engine, table = self.engine, self.engine.table
        for each in self._together(entry):
            if each in engine.calendar.get(table.start_s[each] + table.dur_s[each], ()):
                engine.reschedule(each, inf)
            elif each not in engine.hung:  # on a shared link
                table.dur_s[each] = engine.now_s - table.start_s[each]
                engine.hung.add(each)

    def _together(self, entry: int) -> list[int]:
        """The entries that run as one meeting with `entry`."""
        table = self.engine.table
        if table.kind[entry] not in (COLLECTIVE, SEND, RECV):
            return [entry]
        key, start_s = table.key[entry], table.start_s[entry]
        return [
            other
            for rank in self._partners(entry)
            for other in self._open_entries(rank)
            if table.key[other] == key
            and table.start_s[other] == start_s
            and (table.kind[other] == COLLECTIVE) == (table.kind[entry] == COLLECTIVE)
        ]

    def _partners(self, entry: int) -> tuple[int, ...]:
        action, rank = self.engine.table.action(entry), self.engine.table.rank[entry]
        if isinstance(action, Collective):
            return self.engine.matcher.members(action, rank)
        if isinstance(action, Send | Recv):
            return self.engine.matcher.ends(self.engine.table.key[entry])
        return (rank,)

    def _withdraw(self, entry: int) -> None:
        """Take an entry that has arrived out of its meeting."""
        key = self.engine.table.key[entry]
        for meetings in (self.engine.present, self.engine.waiting):
            if entry in meetings.get(key, ()):
                meetings[key].remove(entry)
                if not meetings[key]:
                    del meetings[key]

    def _restart(self, fault: Fault, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if rank in self.dead:
                self._leave(rank)
                self.dead.discard(rank)
                self._gone.discard(rank)
                self.engine.loader.forget(rank)
                self._membership("join", rank)

    def _leave(self, rank: int) -> None:
        if rank in self._gone or rank not in self.dead:
            return
        self._gone.add(rank)
        engine = self.engine
        waiting = [e for d in (engine.present, engine.waiting) for each in d.values() for e in each]
        for entry in [*waiting, *engine.hung]:
            if entry in self._decided and rank in self._partners(entry):
                self._withdraw(entry)
                self._give_up(entry)
        self._membership("leave", rank)

    def _give_up(self, entry: int) -> None:
        self.engine.hung.discard(entry)
        self._skip_followers(entry)
        self.engine.schedule(self.engine.now_s, (entry,))

    def _skip_followers(self, entry: int) -> None:
        """What waits for an action that was given up is given up when its turn comes."""
        table = self.engine.table
        label = table.action(entry).label
        for distance in table.succ[entry] or ():
            later = entry + distance
            if table.kind[later] == NOTIFY:
                table.kind[later] = SKIP
            elif label and label in table.action(later).after and table.kind[later] != SKIP:
                table.kind[later] = SKIP
                self._skip_followers(later)

    def _pause(self, fault: Fault, ranks: Sequence[int]) -> None:
        table, until_s = self.engine.table, self.engine.now_s + fault.duration_s
        running: set[int] = set()
        for rank in ranks:
            held = []
            for entry in self._open_entries(rank):
                if table.waits[entry]:
                    table.waits[entry] += 1
                    held.append(entry)
                elif table.start_s[entry] >= 0 and entry not in self.engine.hung:
                    running.update(self._together(entry))
            self._paused[rank] = max(until_s, self._paused.get(rank, 0.0))
            self._pauses.setdefault(rank, []).append(held)
            if until_s < inf:
                self.engine.at(until_s, partial(self._resume, rank, held))
        for entry in sorted(running):
            if entry in self.engine.calendar.get(table.start_s[entry] + table.dur_s[entry], ()):
                self.engine.reschedule(entry, fault.duration_s)

    def _resume(self, rank: int, held: list[int]) -> None:
        self._pauses[rank] = [each for each in self._pauses[rank] if each is not held]
        if not self._pauses[rank]:
            del self._pauses[rank]
        self.engine.release(held)

    def _slow(self, fault: Fault, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._slowed.setdefault(rank, []).append(fault.factor)
            self._reprice(rank)
            if fault.duration_s < inf:
                over_s = self.engine.now_s + fault.duration_s
                self.engine.at(over_s, partial(self._recover_speed, rank, fault.factor))

    def _recover_speed(self, rank: int, factor: float) -> None:
        self._slowed[rank].remove(factor)
        self._reprice(rank)

    def _reprice(self, rank: int) -> None:
        table, factor = self.engine.table, prod(self._slowed[rank])
        for entry in self._open_entries(rank):
            action = table.action(entry)
            if table.waits[entry] and isinstance(action, Compute):
                table.dur_s[entry] = factor * self.engine.loader.local_s(action, rank)

    def _partition(self, fault: Fault, ranks: Sequence[int]) -> None:
        self._cuts.append((frozenset(ranks), self.engine.now_s + fault.duration_s))

    def _misdeliver(self, fault: Fault, ranks: Sequence[int]) -> None:
        until_s = self.engine.now_s + fault.duration_s if fault.duration_s else -1.0
        for rank in ranks:
            self._mishaps.setdefault(rank, []).append((fault.kind, until_s))

    # ---- where ranks meet ------------------------------------------------------------------------

    def turned_away(self, entry: int) -> bool:
        """Decided actions do not wait for ranks that are gone; sent messages may be lost."""
        table = self.engine.table
        if entry in self._decided and not self._gone.isdisjoint(self._partners(entry)):
            self._give_up(entry)
            return True
        if table.kind[entry] != SEND or table.rank[entry] not in self._mishaps:
            return False
        kind = self._next_mishap(table.rank[entry])
        if kind == "duplicate":
            again = table.add_entry(
                which=table.which[entry], kind=SEND, rank=NETWORK, key=table.key[entry]
            )
            self.engine.at(self.engine.now_s, partial(self.engine.release, (again,)))
        elif kind == "drop":
            send, (source, target) = table.action(entry), self.engine.matcher.ends(table.key[entry])
            assert isinstance(send, Send)
            self.lost_messages.append(f"{send.label or send.tensor} of rank {source} to {target}")
            self.engine.launch((entry,), self.engine.cost.transfer_s(send, source, target))
        return kind == "drop"

    def _next_mishap(self, rank: int) -> str:
        """What happens to the message that `rank` sends now; "" for nothing."""
        pending = self._mishaps[rank]
        pending[:] = [each for each in pending if each[1] < 0 or each[1] > self.engine.now_s]
        if not pending:
            return ""
        kind, until_s = pending[0]
        if until_s < 0:
            del pending[0]  # one message only
        return kind

    def held(self, entries: Sequence[int]) -> bool:
        """Paused members and partitions delay a start; a dead one prevents it."""
        table, now_s = self.engine.table, self.engine.now_s
        ranks = {table.rank[entry] for entry in entries}
        if not self.dead.isdisjoint(ranks):
            for entry in entries:
                if table.succ[entry] is not None:
                    self.engine.hung.add(entry)
                    if entry in self._decided and not self._gone.isdisjoint(ranks):
                        self._give_up(entry)
            return True
        until_s = max((self._paused.get(rank, 0.0) for rank in ranks), default=0.0)
        for side, over_s in self._cuts:
            if not side.isdisjoint(ranks) and not ranks <= side:
                until_s = max(until_s, over_s)
        if until_s <= now_s:
            return False
        if until_s < inf:
            self.engine.at(until_s, partial(self._retry, entries))
        else:
            self.stalled.append(entries)
        return True

    def _retry(self, entries: Sequence[int]) -> None:
        if self.engine.table.kind[entries[0]] == COLLECTIVE:
            self.engine.start_collective(entries)
        else:
            self.engine.start_message(entries)
