"""One island of a changing membership as a world: it may lose its peers and gets them back.

Decisions go through the store of the membership (`council`), exchanges through groups that every
epoch builds fresh (`exchange`). What an island does itself is bound by name, as in `dist`: ops are
functions of (context, action) that work on the context's tensors. Two ops are this world's own:
"membership.form" says yes to an epoch, waits until it binds and builds its group; "vote" says
whether all it waits for was done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed import TCPStore

from phalanx.action import Action, Collective, Compute, Mark, Program, Send
from phalanx.cost.collectives import wire_bytes
from phalanx.engines.council import FORM, VOTE, Council
from phalanx.engines.exchange import EpochExchange
from phalanx.engines.lanes import Lanes
from phalanx.errors import WorldError, nearest_names
from phalanx.membership import NO_STATE
from phalanx.mesh import Mesh
from phalanx.policy import Event, View
from phalanx.trace import Trace, TraceBuilder
from phalanx.worlds.membership_store import MembershipStore
from phalanx.worlds.torch_tensors import Op, RankContext

POLL_S = 0.002
COMMIT = "commit"
TRACED = 50_000  # actions whose rows are kept, of a job of weeks the last ones


class IslandWorld:
    """The world of one island with one rank; its place on the mesh's axis is its member id.

    Use it in a `with` statement: leaving it ends the heartbeats, which the others take for a leave.

    Args:
        mesh: all islands that the job may have, along one axis.
        membership: this process's side of the membership, not yet started.
        store: where the groups of the epochs meet.
        ops: name -> callable(context, action).
        facts: what the policies' views hold.
        kind: backend of the exchange, "gloo" or "nccl"; control and copies of state never use it.
        context: the tensors of this rank (None: an empty one on the CPU).
    """

    def __init__(
        self,
        mesh: Mesh,
        membership: MembershipStore,
        store: TCPStore,
        *,
        ops: Mapping[str, Op],
        facts: Mapping[str, Any],
        kind: str = "gloo",
        context: RankContext | None = None,
    ) -> None:
        self.mesh, self.membership, self.rank = mesh, membership, membership.me.id
        self.ranks: Sequence[int] = (self.rank,)
        self.context = context or RankContext(self.rank, mesh)
        timeout_s = membership.timeouts.exchange_s
        self.exchange = EpochExchange(store, self.context, kind, timeout_s)
        self._ops = dict(ops)
        self._view = View(mesh=mesh, members=membership.roster.expected, facts=facts)
        self._lanes = Lanes(self._run, expected=("world/membership", "world/timeout"))
        self._council = Council(membership, self._view, lambda: self._lanes.idle)
        self._epoch = -1
        self._of_epoch: list[Action] = []
        self._rows: dict[int, tuple[Action, dict[str, Any]]] = {}
        self._origin_s = time.monotonic()

    def __enter__(self) -> IslandWorld:
        self.membership.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.membership.close()
        self.exchange.close()

    def view(self, scope: str) -> View:
        """The same for all scopes: an island of one rank."""
        return self._view

    def load(self, program: Program) -> None:
        """Raises `world/unbound`: what an island does between exchanges is one op."""
        rule = "an island takes its steps from a policy, not from a program"
        raise WorldError("world/unbound", f"rank {self.rank}", None, rule)

    def issue(self, actions: Sequence[Action]) -> None:
        """Queue what names this rank, or nobody."""
        for action in actions:
            if action.ranks and self.rank not in action.ranks:
                continue
            if isinstance(action, Compute):
                self._require_bound(action)
                if action.op == FORM:
                    self._enter(action.batch["epoch"])
            if isinstance(action, Mark) and action.name == COMMIT:
                self._view.step = int(action.value)
            self._note(action)
            if action.lane == "compute":
                self._lanes.put(action)
            else:  # streams of a group end with its epoch
                self._of_epoch.append(action)
                self._lanes.put(action, self._lane(action))

    def agree(self, scope: str, decide: Callable[[], list[Action]]) -> list[Action]:
        """The leader's decision, once it is in the log."""
        return self._council.agree(decide)

    def next_events(self) -> list[Event]:
        """Block until there is something to decide or to follow; [] at the end of the job."""
        while (events := self._council.events()) is None:
            self._lanes.require_healthy()
            time.sleep(POLL_S)
        return events

    def close(self) -> Trace:
        """The last actions of this rank in order of issue."""
        builder = TraceBuilder("measured")
        builder.extend(row for _, row in self._rows.values())
        return builder.build()

    def _enter(self, epoch: int) -> None:
        self.exchange.enter(epoch)
        self._lanes.retire({self._lane(action) for action in self._of_epoch})
        self._lanes.abandon(action.label for action in self._of_epoch)
        self._epoch, self._of_epoch = epoch, []

    def _lane(self, action: Action) -> str:
        return f"{action.lane}#{self._epoch}"

    def _run(self, action: Action, ready: bool, lane: str) -> None:
        """Carry out an action in its lane's thread."""
        _, row = self._rows.get(id(action), (action, {}))
        start_s = time.monotonic()
        row["start_s"] = start_s - self._origin_s
        if action.operator == VOTE:
            self.membership.vote(action.label, ready)
        elif ready:
            self._carry_out(action, lane)
        row["dur_s"] = time.monotonic() - start_s

    def _carry_out(self, action: Action, lane: str) -> None:
        if isinstance(action, Compute):
            if action.op == FORM:
                self._form(action)
            else:
                self._ops[action.op](self.context, action)
        elif isinstance(action, Mark):
            if action.name == COMMIT:
                self.membership.step = int(action.value)
        else:
            self.exchange.carry_out(action, int(lane.rpartition("#")[2]))

    def _form(self, action: Compute) -> None:
        epoch, members, behind = (action.batch[key] for key in ("epoch", "members", "behind"))
        self._council.await_epoch(epoch)
        self.exchange.form(self.mesh.names[0], tuple(members), epoch)
        if self.rank not in behind and self.membership.step == NO_STATE:
            self.membership.step = self._view.step

    def _require_bound(self, action: Compute) -> None:
        if action.op not in self._ops and action.op not in (FORM, VOTE):
            legal = nearest_names(action.op, self._ops)
            raise WorldError("world/unbound", "op", repr(action.op), "not bound", legal=legal)

    def _note(self, action: Action) -> None:
        payload_bytes = getattr(action, "payload_bytes", 0.0)
        sent = 0.0
        if isinstance(action, Collective):
            sent = wire_bytes(action.collective, payload_bytes, len(action.members))
        elif isinstance(action, Send):
            sent = payload_bytes
        row = {
            "rank": self.rank,
            "step": self._view.step,
            "action_id": action.label,
            "item": action.item,
            "layer": action.layer,
            "phase": action.phase,
            "operator": action.operator,
            "lane": action.lane,
            "axis": getattr(action, "axis", ""),
            "peer": getattr(action, "peer", -1),
            "payload_bytes": payload_bytes,
            "wire_bytes": sent,
        }
        self._rows[id(action)] = (action, row)
        while len(self._rows) > TRACED:
            del self._rows[next(iter(self._rows))]
