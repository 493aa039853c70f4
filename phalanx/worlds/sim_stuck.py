"""Why nothing happens any more: what each rank waits for, and its last collective."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.action import Collective, Recv, Send, Timer
from phalanx.errors import CheckError, PhalanxError, WorldError
from phalanx.worlds.sim_engine import Engine
from phalanx.worlds.sim_faults import Faults
from phalanx.worlds.sim_table import NOTIFY, SKIP, STEP

_SHOWN_RANKS = 8


def stuck_error(engine: Engine, faults: Faults | None) -> PhalanxError | None:
    """The error for entries of live ranks that will never end; None when everything has ended.

    `world/dead` when a rank died, `world/timeout` when a message was lost, a partition or a
    pause stays, else `check/deadlock`: then the program itself can never finish.
    """
    dead = set() if faults is None else faults.dead
    blocked = _blocked_ranks(engine, dead)
    if not blocked:
        return None
    report = Report(engine, dead)
    lines = [line for rank in blocked[:_SHOWN_RANKS] for line in report.of(rank)]
    if len(blocked) > _SHOWN_RANKS:
        lines.append(f"and {len(blocked) - _SHOWN_RANKS} more ranks")
    detail = "\n".join(lines)
    num_blocked = len(blocked)
    where = f"rank {blocked[0]}"
    head = next((name for _, name, _ in report.heads(blocked[0])), None)
    if dead:
        names = ", ".join(map(str, sorted(dead)))
        rule = f"died at or before {engine.now_s:g} s; {num_blocked} ranks still need it"
        return WorldError("world/dead", f"rank {names}", None, rule, detail=detail)
    if faults is not None and (blame := faults.blame()):
        rule = f"{blame}; {num_blocked} ranks wait for ever"
        return WorldError("world/timeout", where, head, rule, detail=detail)
    rule = f"can never start or end; {num_blocked} ranks wait for ever"
    return CheckError("check/deadlock", where, head, rule, detail=detail)


def _blocked_ranks(engine: Engine, dead: set[int]) -> list[int]:
    table = engine.table
    open_ranks = {rank for rank, following in zip(table.rank, table.succ) if following is not None}
    return sorted(rank for rank in open_ranks if rank >= 0 and rank not in dead)


class Report:
    """Reads the state of an engine that has come to rest."""

    def __init__(self, engine: Engine, dead: set[int]) -> None:
        self.engine, self.table, self.dead = engine, engine.table, dead
        self._key_of_arrived = {e: k for k, each in engine.present.items() for e in each}

    def of(self, rank: int) -> list[str]:
        """The lines about one rank."""
        lines = [f"rank {rank}: last collective {self._last_collective(rank)}"]
        for lane, name, reason in self.heads(rank):
            lines.append(f"  {lane}: {name} {reason}")
        return lines

    def heads(self, rank: int) -> list[tuple[str, str, str]]:
        """(lane, action, reason) of the first action of each lane that has not ended."""
        heads: dict[str, tuple[str, str, str]] = {}
        for entry in self._entries(rank):
            if self.table.succ[entry] is None or self.table.kind[entry] == SKIP:
                continue
            action = self.table.action(entry)
            lane = f"timer {action.label}" if isinstance(action, Timer) else action.lane
            if lane not in heads:
                name = action.label or f"{action.operator} {getattr(action, 'tensor', '')}".strip()
                heads[lane] = (lane, name, self._reason(entry))
        return list(heads.values())

    def _entries(self, rank: int) -> Iterator[int]:
        for span in self.engine.loader.entries_of.get(rank, []):
            for entry in span:
                if self.table.kind[entry] not in (NOTIFY, STEP):
                    yield entry

    def _reason(self, entry: int) -> str:
        action, rank = self.table.action(entry), self.table.rank[entry]
        if entry in self.engine.hung:
            return "was cut off"
        if not self.table.waits[entry]:
            return f"waits for {self._missing(entry)}"
        labels = [label for label in action.after if not self._has_ended(rank, label)]
        if labels:
            return f"waits for {', '.join(labels)}"
        return "waits for its turn"

    def _has_ended(self, rank: int, label: str) -> bool:
        entry = self.engine.loader.find(rank, label)
        return entry is not None and self.table.succ[entry] is None

    def _missing(self, entry: int) -> str:
        action, rank = self.table.action(entry), self.table.rank[entry]
        if isinstance(action, Send | Recv):
            peer = self.engine.mesh.peer(rank, action.axis, action.peer)
            what = "receive" if isinstance(action, Send) else "send"
            return f"rank {peer} to {what} {action.tensor}{self._dead_note(peer)}"
        if isinstance(action, Collective):
            key = self._key_of_arrived.get(entry)
            arrived = {self.table.rank[e] for e in self.engine.present.get(key or 0, ())}
            members = self.engine.matcher.members(action, rank)
            absent = [member for member in members if member not in arrived]
            shown = ", ".join(f"{m}{self._dead_note(m)}" for m in absent[:_SHOWN_RANKS])
            return f"ranks {shown}" if absent else "a start that never came"
        return "a start that never came"

    def _dead_note(self, rank: int) -> str:
        return " (dead)" if rank in self.dead else ""

    def _last_collective(self, rank: int) -> str:
        last, ended_s = "none", -1.0
        for entry in self._entries(rank):
            if self.table.succ[entry] is None and self.table.start_s[entry] >= 0:
                action = self.table.action(entry)
                end_s = self.table.start_s[entry] + self.table.dur_s[entry]
                if isinstance(action, Collective) and end_s >= ended_s:
                    last, ended_s = f"{action.operator} {action.label}".strip(), end_s
        return last
