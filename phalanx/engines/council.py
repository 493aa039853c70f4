"""One member's part in deciding: leads, follows, and takes over when the leader is gone.

Decisions go through the log of the membership's store before anyone acts on them, so they outlive
their leader and everyone acts on the same list. The leader turns heartbeats and votes into events;
followers read. A member that takes over starts its policies anew with a "start" event whose
`data["behind"]` names the members without a state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.action import Action
from phalanx.errors import WorldError
from phalanx.membership import NOBODY, Ballot, Member, Membership
from phalanx.policy import Event, View
from phalanx.worlds.action_json import actions_from_json, actions_to_json
from phalanx.worlds.membership_store import MembershipStore, membership_of

FORM, VOTE = "membership.form", "vote"


class Council:
    """The control side of a world whose members come and go.

    Args:
        membership: started by the owner.
        view: kept up to date: members, epoch.
        idle: whether this member has carried out all that was decided.
    """

    def __init__(self, membership: MembershipStore, view: View, idle: Callable[[], bool]) -> None:
        self.membership, self.view, self._idle = membership, view, idle
        self._seq = membership.first_seq
        last = membership.decision(self._seq - 1)
        self._leader = None if last is None else Member(*last["leader"])
        self._read_s = membership.now_s  # when the leader's latest decision was read
        self._leading = self._begun = self._admitted = self._ended = False
        self._decided: list[Action] = []
        self._vote: tuple[str, Ballot] | None = None
        self._against_s: float | None = None
        self._origin_s = time.monotonic()

    def events(self) -> list[Event] | None:
        """What there is to decide or to follow; None: nothing now; []: nothing ever again."""
        now_s = self.membership.poll()
        self.view.now_s = time.monotonic() - self._origin_s
        if self._ended:
            return [] if self._idle() else None
        if not self._leading:
            return self._follow(now_s)
        return self._lead(now_s) if self._begun else self._begin(now_s)

    def agree(self, decide: Callable[[], list[Action]]) -> list[Action]:
        """The leader's decision, once it is in the log; what the log holds on the others."""
        if not self._leading:
            decided, self._decided = self._decided, []
            return decided
        actions = decide()
        if not actions:
            return []
        proposal = self._propose(actions)
        if not self._append(actions=actions_to_json(actions), membership=proposal):
            return []
        if proposal is not None:
            self._admit(proposal)
        self._open_vote(actions)
        return actions

    def await_epoch(self, epoch: int) -> None:
        """Say yes to an epoch and wait until it binds. Called from a lane's thread.

        Raises:
            WorldError: `world/membership` when a later one takes its place, `world/timeout` after
                `init_s`.
        """
        self.membership.vote(f"epoch/{epoch}", True)
        end_s = time.monotonic() + self.membership.timeouts.init_s
        while (bound := self.membership.roster.current.epoch) < epoch:
            if self.view.epoch > epoch:
                break
            if time.monotonic() > end_s:
                rule = f"did not bind within {self.membership.timeouts.init_s:g} s"
                raise WorldError("world/timeout", "epoch", epoch, rule)
            time.sleep(0.001)
        if max(bound, self.view.epoch) > epoch:
            raise WorldError("world/membership", "epoch", epoch, "a later one took its place")

    # ---- leading ---------------------------------------------------------------------------------

    def _begin(self, now_s: float) -> list[Event] | None:
        """The first event of a leader, once everyone that it needs is there."""
        roster, timeouts = self.membership.roster, self.membership.timeouts
        alive = roster.alive(now_s)
        if roster.current != NOBODY:
            members = tuple(m for m in roster.current.members if m in alive)
            behind = roster.behind(members)
        elif len(alive) == len(roster.expected):
            members, behind = alive, ()
        elif now_s < timeouts.quorum_s:
            return None
        else:
            missing = sorted({*roster.expected} - {member.id for member in alive})
            rule = f"did not come within {timeouts.quorum_s:g} s; the start needs everyone"
            raise WorldError("world/timeout", "members", missing, rule)
        self._begun = True
        self.view.members = tuple(member.id for member in members)
        return [self._event("start", data={"behind": tuple(member.id for member in behind)})]

    def _lead(self, now_s: float) -> list[Event] | None:
        roster = self.membership.roster
        if roster.ballot is not None:
            self._bind(roster.ballot)
        events = self._count_votes(now_s)
        changes = roster.changes(now_s)
        events += [self._event(change.kind, rank=change.member.id) for change in changes]
        if events:
            return events
        if self._vote is None and roster.ballot is None and self._idle():
            self._ended = self._append(end=True)
        return None

    def _bind(self, ballot: Ballot) -> None:
        roster = self.membership.roster
        verdict = self.membership.count_votes(f"epoch/{roster.proposed.epoch}", ballot)
        if verdict is False:
            missing = [member.id for member in ballot.missing]
            rule = "these are alive but did not agree in time"
            raise WorldError("world/timeout", f"epoch {roster.proposed.epoch}", missing, rule)
        if verdict is None:
            return
        if self.membership.bind(roster.proposed):
            self.view.members = roster.commit(self.membership.now_s).ids
        else:
            self._leading = False

    def _count_votes(self, now_s: float) -> list[Event]:
        """The outcome of the vote under way. A vote against waits for its cause: either a member
        falls silent, which is a leave, or everyone is heard of again and it counts."""
        if self._vote is None:
            return []
        label, ballot = self._vote
        verdict = self.membership.count_votes(label, ballot)
        if verdict is None:
            return []
        if verdict is False:
            if not ballot.votes or all(ballot.votes.values()):
                missing = [member.id for member in ballot.missing]
                raise WorldError("world/timeout", label, missing, "these are alive but do not vote")
            self._against_s = self._against_s or now_s
            seen_s = [self.membership.roster.seen_s(voter) for voter in ballot.voters]
            if min(seen_s) <= self._against_s:
                return []
        self._vote = None
        return [self._event("done", label=label, data={"yes": verdict})]

    def _propose(self, actions: Sequence[Action]) -> Membership | None:
        for action in actions:
            if action.operator == FORM:
                epoch, members = action.batch["epoch"], action.batch["members"]
                return self.membership.roster.propose(members, self.membership.now_s, epoch)
        return None

    def _open_vote(self, actions: Sequence[Action]) -> None:
        roster, timeouts = self.membership.roster, self.membership.timeouts
        for action in actions:
            if action.operator == VOTE:
                bound = roster.current if roster.ballot is None else roster.proposed
                ballot = Ballot(bound.members, self.membership.now_s + timeouts.quorum_s)
                self._vote, self._against_s = (action.label, ballot), None

    def _append(self, **entry: Any) -> bool:
        """Write a decision; whoever finds its number taken leads no longer and reads instead."""
        written = self.membership.append(self._seq, {"leader": self.membership.me, **entry})
        if written:
            self._seq += 1
        else:
            self._leading = False
        return written

    # ---- following -------------------------------------------------------------------------------

    def _follow(self, now_s: float) -> list[Event] | None:
        entry = self.membership.decision(self._seq)
        if entry is None:
            self._watch_leader(now_s)
            return None
        self._seq += 1
        self._leader, self._read_s = Member(*entry["leader"]), now_s
        if entry.get("end"):
            self._ended = True
            return None
        if entry["membership"] is not None:
            self._admit(membership_of(entry["membership"]))
        if not self._admitted:
            return None  # decided before this process belonged
        self._decided = actions_from_json(entry["actions"])
        return [self._event("done", label=f"decision@{self._seq - 1}")]

    def _watch_leader(self, now_s: float) -> None:
        roster = self.membership.roster
        if self.view.epoch > roster.current.epoch:
            self.view.members = roster.adopt(self.membership.committed()).ids
        if self.membership.inherits_from(self._leader, self._read_s):
            self._leading, self._begun, self._vote = True, False, None
        elif self._leader is not None and roster.heir(now_s) is None:
            if roster.has_left(self._leader, now_s, self._read_s):
                rule = "nobody alive has the state; only a durable checkpoint would help"
                raise WorldError("world/membership", "members", roster.current.ids, rule)

    def _admit(self, membership: Membership) -> None:
        if self.membership.me in membership.members:
            self._admitted, self.view.epoch = True, membership.epoch
        elif self._admitted:
            rule = "goes on without this process; start it again to join"
            raise WorldError("world/membership", "epoch", membership.epoch, rule)

    def _event(self, kind: str, **more: Any) -> Event:
        return Event(kind=kind, time_s=self.view.now_s, **more)
