"""A fault script on a real world: what `sim` does to virtual ranks happens to real ones.

    world = FaultyWorld(DistWorld(...), script)
    drive(world, program=program)

On real processes a killed rank is killed with SIGKILL and a paused one is stopped with SIGSTOP, so
nothing in it can take notice; a slow one sleeps after each compute. Faults strike when the rank is
about to carry out its next action, kills and pauses at a time (`at_s`) wherever it is. Starting a
killed rank again (`restart`) is what its launcher does. In one process (`LocalWorld`) a killed rank
starts nothing any more and a paused one nothing until it goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from phalanx.action import Action, Collective, Program, Recv, Send
from phalanx.errors import WorldError
from phalanx.policy import Event, View
from phalanx.trace import Trace
from phalanx.worlds.faults import Fault, FaultScript
from phalanx.worlds.pending import Entry, is_transfer
from phalanx.worlds.real import RealWorld

_CONTINUE = (
    "import os, signal, sys, time; time.sleep(float(sys.argv[1]));"
    "os.kill(int(sys.argv[2]), signal.SIGCONT)"
)


class FaultyWorld:
    """A real world that a script disturbs; everything else is the world's.

    Args:
        world: a `LocalWorld` or `DistWorld`. (`SimWorld` takes a script itself.)
        script: what goes wrong.

    Raises:
        JobError: `mesh/rank` for a fault of a rank that the mesh does not have.
        WorldError: `world/unbound` for a fault that this world cannot carry out.
    """

    def __init__(self, world: RealWorld, script: FaultScript) -> None:
        script.require_ranks(world.mesh.size)
        self.world, self.script = world, script
        self.mesh, self.ranks = world.mesh, world.ranks
        self._is_alone = len(world.ranks) == 1 < world.mesh.size  # this process is one rank
        self._require_possible()
        self._struck: set[tuple[int, int]] = set()
        self._dead: set[int] = set()
        self._lost: list[tuple[int, str]] = []
        self._until_s: dict[str, dict[int, float]] = {"pause": {}, "partition": {}}
        self._cuts: dict[int, frozenset[int]] = {}
        self._slow: dict[int, list[tuple[float, float]]] = {}
        self._mishaps: dict[int, list[tuple[str, float]]] = {}
        world.interference = self
        self._set_alarms()

    # ---- the protocol ----------------------------------------------------------------------------

    def view(self, scope: str) -> View:
        return self.world.view(scope)

    def load(self, program: Program) -> None:
        self.world.load(program)

    def issue(self, actions: Sequence[Action]) -> None:
        self.world.issue(actions)

    def agree(self, scope: str, decide: Callable[[], list[Action]]) -> list[Action]:
        return self.world.agree(scope, decide)

    def next_events(self) -> list[Event]:
        return self.world.next_events()

    def close(self) -> Trace:
        return self.world.close()

    # ---- what the world asks ---------------------------------------------------------------------

    def hold_s(self, entry: Entry) -> float:
        """Seconds that an entry must not start for; strikes what is due before it."""
        now_s, rank = self.world.now_s, entry.rank
        done = max(0, entry.step - 1) if entry.planned else entry.step
        for fault in self.script.due(now_s, done, rank, entry.action.label):
            self._strike_once(fault, rank)
        if rank in self._dead:
            return inf
        until_s = self._until_s["pause"].get(rank, 0.0)
        if is_transfer(entry.action) and self._is_cut(entry):
            until_s = max(until_s, self._until_s["partition"][rank])
        return max(0.0, until_s - self.world.now_s)

    def after_compute(self, entry: Entry) -> None:
        """Let a compute of a slow rank take longer."""
        start_s = self.world.seconds(entry.start) - self.world.origin_s
        for until_s, factor in self._slow.get(entry.rank, []):
            if start_s <= until_s:
                time.sleep((factor - 1.0) * (self.world.now_s - start_s))

    def copies(self, entry: Entry) -> int:
        """How often a message arrives."""
        mishaps = self._mishaps.get(entry.rank, [])
        for kind, until_s in list(mishaps):
            if until_s == 0.0:
                mishaps.remove((kind, until_s))  # the next message only
            elif self.world.now_s > until_s:
                continue
            if kind == "duplicate":
                return 2
            self._lost.append((entry.rank, str(entry)))
            return 0
        return 1

    def blame(self, detail: str) -> WorldError | None:
        """The error about actions that can never happen; None when no fault explains it."""
        if self._dead:
            ranks = ", ".join(map(str, sorted(self._dead)))
            rule = "was killed by the fault script, and others still need it"
            return WorldError("world/dead", f"rank {ranks}", None, rule, detail=detail)
        if self._lost:
            rank, message = self._lost[0]
            rule = f"the fault script lost its message {message}"
            return WorldError("world/timeout", f"rank {rank}", None, rule, detail=detail)
        for kind, until_s in self._until_s.items():
            cut_off = [rank for rank, end_s in until_s.items() if end_s == inf]
            if cut_off:
                where, rule = f"rank {cut_off[0]}", f"its {kind} by the fault script never ends"
                return WorldError("world/timeout", where, None, rule, detail=detail)
        return None

    # ---- striking --------------------------------------------------------------------------------

    def _require_possible(self) -> None:
        for index, fault in enumerate(self.script.faults):
            where = f"faults[{index}].{fault.kind}"
            if fault.kind == "slow" and fault.factor < 1.0:
                rule = "a real rank cannot be made faster"
                raise WorldError("world/unbound", where, fault.factor, rule, legal=[1.0])
            if fault.kind == "restart" and not self._is_alone:
                rule = "ranks that share a process have no launcher to start them again"
                raise WorldError("world/unbound", where, None, rule)

    def _set_alarms(self) -> None:
        """Kills and pauses of this process strike at their time, whatever it does then."""
        for fault in self.script.faults:
            is_mine = self._is_alone and self.ranks[0] in fault.ranks
            if is_mine and fault.at_s is not None and fault.kind in ("kill", "pause"):
                left_s = max(0.0, fault.at_s - self.world.now_s)
                alarm = threading.Timer(left_s, self._strike_once, (fault, self.ranks[0]))
                alarm.daemon = True
                alarm.start()

    def _strike_once(self, fault: Fault, rank: int) -> None:
        number = self.script.faults.index(fault)
        if (number, rank) in self._struck:
            return
        together = fault.ranks if fault.kind == "partition" else (rank,)
        self._struck.update((number, each) for each in together)
        for each in together:
            self._strike(fault, each)

    def _strike(self, fault: Fault, rank: int) -> None:
        until_s = self.world.now_s + fault.duration_s
        if fault.kind == "kill":
            if self._is_alone:
                os.kill(os.getpid(), signal.SIGKILL)
            self._dead.add(rank)
        elif fault.kind == "pause" and self._is_alone:
            _stop_this_process(fault.duration_s)
        elif fault.kind in ("pause", "partition"):
            self._until_s[fault.kind][rank] = until_s
            self._cuts[rank] = frozenset(fault.ranks)
        elif fault.kind == "slow":
            self._slow.setdefault(rank, []).append((until_s, fault.factor))
        elif fault.kind in ("drop", "duplicate"):
            lasts_s = until_s if fault.duration_s else 0.0
            self._mishaps.setdefault(rank, []).append((fault.kind, lasts_s))

    def _is_cut(self, entry: Entry) -> bool:
        """Whether a transfer would cross a partition; its side alone holds it back."""
        if entry.rank not in self._until_s["partition"]:
            return False
        action: Any = entry.action
        if isinstance(action, Collective):
            others = action.members or self.mesh.group(entry.rank, action.axis)
        else:
            assert isinstance(action, Send | Recv)
            others = (self.mesh.peer(entry.rank, action.axis, action.peer),)
        return not self._cuts[entry.rank].issuperset(others)


def _stop_this_process(duration_s: float) -> None:
    """SIGSTOP now, SIGCONT from a child after `duration_s` (inf: never)."""
    if duration_s < inf:
        subprocess.Popen([sys.executable, "-c", _CONTINUE, str(duration_s), str(os.getpid())])
    os.kill(os.getpid(), signal.SIGSTOP)
