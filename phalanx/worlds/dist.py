"""One rank among real processes: the same programs on gloo or NCCL.

    world = DistWorld(mesh, ops, rank, store, timeout_s=60.0)
    world.tensors["x"] = ...
    trace = drive(world, program=program, reacts=policies)

- Transfers start as soon as they may, in list order per lane and per group, and run beside compute.
- One gloo or NCCL group per mesh axis, a fresh one per epoch where an action names its members.
- On NCCL a transfer has ended for the host once it is issued; what needs it waits on the stream.
- Sizes are compared with the plan before anything is sent.
- With React policies all ranks meet at the store in rounds, and the lowest one decides (`rounds`).
- When a rank dies, hangs or raises, the others stop: the error names it and its last collective.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist

from phalanx.action import Action, Collective, Recv, Send, Timer
from phalanx.errors import WorldError
from phalanx.mesh import Mesh
from phalanx.policy import Event
from phalanx.trace import Trace
from phalanx.worlds.comm_log import last_collective
from phalanx.worlds.groups import LogicalGroup, bury
from phalanx.worlds.logged_group import LoggedGroup
from phalanx.worlds.pending import Entry, Pending, meeting
from phalanx.worlds.pulse import ENDED, Pulse, wait_for
from phalanx.worlds.real import RealWorld
from phalanx.worlds.rounds import Rounds
from phalanx.worlds.torch_clock import clock_of
from phalanx.worlds.torch_tensors import Op, RankContext
from phalanx.worlds.torch_transfers import Waiters, issue_collective, issue_messages

_SLICE_S = 0.2  # between two looks at what other ranks say
_GRACE_S = 10.0  # gloo gives up later than this world, which can say more


class DistWorld(RealWorld):
    """One rank; see `RealWorld` for what it shares with `local`.

    Args:
        mesh: the grid of the job; one process per rank.
        ops: name -> callable(context, action).
        rank: of this process.
        store: a torch store that all ranks share and that outlives them.
        backend: "gloo" or "nccl"; with `device` and `dtype` read once from the plan.
        timeout_s: how long one rank may keep the others waiting.
        name: of this world among those that share the store.
        facts, job, traced_steps: see `RealWorld`.

    Attributes:
        tensors: of this rank, by handle.

    Raises:
        WorldError: `world/timeout` naming the ranks that did not come.
    """

    def __init__(
        self,
        mesh: Mesh,
        ops: Mapping[str, Op],
        rank: int,
        store: dist.Store,
        *,
        backend: str = "gloo",
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        timeout_s: float = 60.0,
        name: str = "world",
        facts: Mapping[str, Any] | None = None,
        job: str = "",
        traced_steps: Container[int] | None = None,
    ) -> None:
        super().__init__(mesh, (rank,), ops, facts=facts, job=job, traced_steps=traced_steps)
        self.rank, self.timeout_s = rank, timeout_s
        self._context = RankContext(rank, mesh, device, dtype)
        self.tensors = self._context.tensors
        self._is_stream_ordered = backend != "gloo"
        self._clock = clock_of(self._context.device)
        self._store, self._name, self._backend = store, name, backend
        self._now_in = "start"
        beat_s = min(1.0, timeout_s / 20)
        self.pulse = Pulse(store, name, rank, self._doing, beat_s)
        self._rounds = Rounds(store, name, range(mesh.size), self.pulse, timeout_s)
        self._waiters = Waiters(self._clock)
        self._unwaited: list[Entry] = []  # transfers whose end only their stream knows
        self._strays: list[Any] = []  # second copies of messages, alive as long as their buffers
        self._epochs: dict[str, LogicalGroup] = {}
        self._last_met: dict[Hashable, Entry] = {}  # newest transfer of each kind of meeting
        self._groups: dict[str, LoggedGroup] = {}
        with self._reporting():
            self._meet()
            self._groups |= {axis: self._group_of(axis) for axis in mesh.names}

    # ---- the protocol ----------------------------------------------------------------------------

    def issue(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Timer) and action.delay_s >= self.timeout_s:
                rule = f"the others wait for rank 0's timers no longer than {self.timeout_s:g} s"
                where = f"action {action.label or action.operator}"
                raise WorldError("world/unbound", where, f"{action.delay_s:g} s", rule)
        super().issue(actions)

    def agree(self, scope: str, decide: Callable[[], list[Action]]) -> list[Action]:
        with self._reporting():
            return self._rounds.decide(decide)

    def next_events(self) -> list[Event]:
        with self._reporting():
            events = super().next_events()
            if not self.views:
                return events  # nobody decides: this rank needs no other's events
            if not self._rounds.leads:  # the job starts and steps once, not once per rank
                events = [event for event in events if event.kind not in ("start", "step")]
            return self._rounds.gather(events)

    def close(self) -> Trace:
        with self._reporting():
            self._await_streams(self._unwaited)
        self.pulse.close()
        self._waiters.close()
        for group in self._epochs.values():
            group.close()
        return super().close()

    # ---- what a real world decides ---------------------------------------------------------------

    def context(self, rank: int) -> RankContext:
        return self._context

    def now(self) -> Any:
        return self._clock.now()

    def seconds(self, moment: Any) -> float:
        return self._clock.seconds(moment)

    def start_transfers(self, pending: Pending) -> None:
        messages: dict[str, list[Entry]] = {}
        while pending.ready_transfers:
            entry = pending.ready_transfers.popleft()
            if self.is_held(entry):
                continue
            self.await_earlier(entry)
            if isinstance(entry.action, Collective):
                self._start_collective(entry, entry.action)
            else:
                messages.setdefault(entry.action.axis, []).append(entry)
                entry.start = self.now()
                pending.set_under_way(entry)  # releases what may be sent in the same batch
        for axis, entries in messages.items():
            self._start_messages(self._groups[axis], entries)

    def await_earlier(self, entry: Entry) -> None:
        self._now_in = str(entry)
        self._await_streams(entry.earlier)

    def await_transfer(self, until_s: float | None) -> bool:
        if not self.pending[self.rank].num_under_way or not self._waiters.num_open:
            return False
        self._now_in = f"wait for {self._waiters.oldest()}"
        end_s = time.perf_counter() + self.timeout_s
        while True:
            now_s = time.perf_counter()
            if until_s is not None and now_s >= until_s:
                return False
            limit_s = end_s if until_s is None else min(end_s, until_s)
            try:
                done = self._waiters.next_done(max(0.0, min(_SLICE_S, limit_s - now_s)))
            except Empty:
                self.pulse.require_all_well()
                if now_s >= end_s:
                    raise self._late(self._waiters.oldest()) from None
                continue
            self._finish(*done)
            return True

    def end_transfers(self) -> None:
        while self._waiters.num_open:
            try:
                done = self._waiters.next_done(0.0)
            except Empty:
                return
            self._finish(*done)

    # ---- transfers -------------------------------------------------------------------------------

    def _start_collective(self, entry: Entry, action: Collective) -> None:
        group = self._group_for(action)
        tensor = self._context.require_payload(action, group.size())
        entry.start = self.now()
        self.pending[self.rank].set_under_way(entry)
        work, output = issue_collective(group, action, tensor, self._context.device)
        self._follow(entry, [work], output)

    def _start_messages(self, group: LoggedGroup, entries: Sequence[Entry]) -> None:
        """Messages of one axis go out as one batch, so that NCCL pairs cannot block each other."""
        messages = [self._message(entry) for entry in entries]
        works = iter(issue_messages(group, [m for m, copies in messages for _ in range(copies)]))
        for entry, ((action, tensor), copies) in zip(entries, messages):
            output = tensor if isinstance(action, Recv) else None
            self._follow(entry, [next(works) for _ in range(copies)], output)

    def _message(self, entry: Entry) -> tuple[tuple[Send | Recv, torch.Tensor], int]:
        """A message with its checked tensor, and how often it is issued."""
        action = entry.action
        assert isinstance(action, Send | Recv)
        if isinstance(action, Recv):
            return (action, self._context.arrival(action)), 1
        tensor = self._context.get(action.tensor)
        self._context.require_size(action, tensor.nbytes)
        copies = 1 if self.interference is None else self.interference.copies(entry)
        return (action, tensor.contiguous()), copies

    def _follow(self, entry: Entry, works: Sequence[Any], output: torch.Tensor | None) -> None:
        """Let the world know when a transfer that has been issued ends (one without work: now)."""
        self._strays += works[1:]
        if not works:
            self._finish(entry, output, self.now(), None)
        elif self._is_stream_ordered:
            entry.work = works[0]
            self._unwaited.append(entry)
            self._finish(entry, output, None, None)
        else:
            self._waiters.add(entry, works[0], output)

    def _finish(
        self, entry: Entry, output: torch.Tensor | None, moment: Any, error: Exception | None
    ) -> None:
        if error is not None:
            raise self._broken(entry, error) from error
        action = entry.action
        if output is not None:
            handle = action.tensor if isinstance(action, Recv) else action.into or action.tensor
            self.tensors[handle] = output
        entry.end = moment
        self._last_met[meeting(action)] = entry
        self.end(entry)

    def _await_streams(self, entries: Sequence[Entry]) -> None:
        """Let the current stream wait for transfers (an accelerator's; the host goes on)."""
        for entry in list(entries):
            if entry.work is not None:
                entry.work.wait()
                entry.work, entry.end = None, self.now()
                self._unwaited.remove(entry)

    def _group_for(self, action: Collective) -> LoggedGroup:
        if not action.members:
            return self._groups[action.axis]
        if action.axis not in self._epochs:
            self._epochs[action.axis] = LogicalGroup(
                dist.PrefixStore(f"{self._name}/epochs", self._store),
                action.axis,
                self.rank,
                self._backend,
                self.timeout_s,
            )
        group = self._epochs[action.axis]
        return group.current(action.members, action.epoch)

    # ---- meeting the others ----------------------------------------------------------------------

    def _meet(self) -> None:
        """All ranks are there; on one machine their traces count time from one moment."""
        keys = [f"{self._name}/here/{rank}" for rank in range(self.mesh.size)]
        node = socket.gethostname()
        self._store.set(keys[self.rank], json.dumps([node, self.origin_s]))
        missing = wait_for(self._store, keys, self.pulse, self.timeout_s)
        if missing:
            ranks = [keys.index(key) for key in missing]
            rule = f"did not start within {self.timeout_s:g} s"
            raise WorldError("world/timeout", f"ranks {ranks}", None, rule)
        first_node, origin_s = json.loads(self._store.get(keys[0]))
        if first_node == node:
            self.origin_s = origin_s

    def _group_of(self, axis: str) -> LoggedGroup:
        ranks = self.mesh.group(self.rank, axis)
        store = dist.PrefixStore(f"{self._name}/axis/{axis}/{ranks[0]}", self._store)
        timeout = timedelta(seconds=self.timeout_s + _GRACE_S)
        return LoggedGroup(self._backend, store, ranks.index(self.rank), ranks, timeout, axis=axis)

    def _doing(self) -> str:
        return f"{self._now_in}; last collective: {last_collective() or 'none'}"

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """An error here is news for all ranks, so that none waits for this one."""
        try:
            yield
        except Exception as error:
            self.pulse.publish(error)
            for group in self._groups.values():
                bury(group, self.timeout_s + _GRACE_S)
            raise

    def _others(self, entry: Entry) -> tuple[int, ...]:
        action = entry.action
        if isinstance(action, Send | Recv):
            return (self.mesh.peer(self.rank, action.axis, action.peer),)
        members = action.members or self.mesh.group(self.rank, action.axis)
        return tuple(rank for rank in members if rank != self.rank)

    def _late(self, entry: Entry) -> WorldError:
        """The error for a transfer that did not end in time."""
        others = self._others(entry)
        silent = self.pulse.find_silent(others)
        behind = [r for r in others if str(entry) not in self.pulse.last_words(r)]
        suspects = silent or behind or list(others)
        state = "sends no heartbeat" if silent else "still beats"
        if self.pulse.last_words(suspects[0]) == ENDED:
            state = f"has {ENDED}"
        rule = f"did not come to {entry} of rank {self.rank} in {self.timeout_s:g} s and {state}"
        return self._blame("world/timeout", suspects, rule)

    def _broken(self, entry: Entry, error: Exception) -> WorldError:
        """The error for a transfer whose connection broke: whoever has ended, or is silent now,
        caused it."""
        ended = [r for r in self._others(entry) if self.pulse.last_words(r) == ENDED]
        if ended:
            rule = f"has {ENDED} without coming to {entry} of rank {self.rank}"
            return self._blame("world/timeout", ended, rule)
        silent = self.pulse.find_silent(range(self.mesh.size))
        if silent:
            return self._blame("world/dead", silent, f"died; {entry} of rank {self.rank} broke off")
        rule = f"{entry} broke off though all ranks are alive: {error}"
        return self._blame("world/failed", self._others(entry), rule)

    def _blame(self, code: str, ranks: Sequence[int], rule: str) -> WorldError:
        where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
        lines = []
        for rank in ranks:
            met = [entry for entry in self._last_met.values() if rank in self._others(entry)]
            last = max(met, key=lambda entry: self.seconds(entry.end), default="nothing")
            words = self.pulse.last_words(rank)
            lines.append(f"rank {rank} last took part in {last}; its last heartbeat: {words}")
        return WorldError(code, where, None, rule, detail="\n".join(lines))
