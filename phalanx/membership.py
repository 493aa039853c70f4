"""Who belongs to a group whose members come and go: heartbeats, epochs, votes.

A pure state machine: time is passed in, nothing is sent. A simulated world and a real store feed it
alike. Terms: a member is an id (its place) with an incarnation (which process holds the place now:
a restarted process is another one); an epoch is a number with the members that it binds; a ballot
is one two-phase decision.

Rules
- A member that is silent for longer than `detect_s`, or whose place another incarnation took, has
  left. Liveness is judged by heartbeats only, never by a collective's exception.
- Who acts before its first heartbeat was heard is alive: its silence counts from the act on.
- An epoch needs a donor: someone of the epoch before that is still alive and has the state. Only
  the first epoch may do without, and then everyone expected must be there (equal initial values),
  or a durable state must exist. So a process that has just restarted never forms a membership of
  one that spreads its random weights.
- An epoch binds once everyone in it said yes; a vote of another incarnation does not count.
- Timeouts nest, the inner one first: heartbeat < detection < exchange < island < init < quorum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from math import inf
from typing import NamedTuple

from phalanx.errors import JobError, WorldError

NO_STATE = -1


class Member(NamedTuple):
    """A place and the process that holds it."""

    id: int
    incarnation: int


class Membership(NamedTuple):
    """An epoch and the members that it binds, by id."""

    epoch: int
    members: tuple[Member, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """Places, in order."""
        return tuple(member.id for member in self.members)


class Change(NamedTuple):
    """kind: "leave" or "join"."""

    kind: str
    member: Member


NOBODY = Membership(0, ())


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds, each longer than the one before, so that the cause is named before its effects.

    Attributes:
        heartbeat_s: between two heartbeats.
        detect_s: silence after which a member has left.
        exchange_s: one exchange between islands.
        island_s: one collective inside an island.
        init_s: the vote on an epoch and the making of its group.
        quorum_s: until everyone expected is there at the start.

    Raises:
        JobError: `job/bad-value` naming the two that do not nest.
    """

    heartbeat_s: float = 0.5
    detect_s: float = 5.0
    exchange_s: float = 60.0
    island_s: float = 120.0
    init_s: float = 300.0
    quorum_s: float = 600.0

    def __post_init__(self) -> None:
        names = [each.name for each in fields(self)]
        for inner, outer in pairwise(names):
            if not 0 < getattr(self, inner) < getattr(self, outer):
                rule = f"must be longer than {inner} = {getattr(self, inner)}: timeouts nest"
                raise JobError("job/bad-value", f"timeouts.{outer}", getattr(self, outer), rule)


@dataclass
class Ballot:
    """One two-phase decision: every voter says yes before the deadline, or it is off.

    The first vote of a voter counts; votes of anyone else are ignored.
    """

    voters: tuple[Member, ...]
    deadline_s: float
    votes: dict[Member, bool] = field(default_factory=dict)

    def vote(self, member: Member, yes: bool) -> bool:
        """Record a vote; whether it counts."""
        counts = member in self.voters and member not in self.votes
        if counts:
            self.votes[member] = yes
        return counts

    @property
    def missing(self) -> tuple[Member, ...]:
        """Voters that have not voted."""
        return tuple(voter for voter in self.voters if voter not in self.votes)

    def verdict(self, now_s: float) -> bool | None:
        """True: all said yes. False: one said no, or time is up. None: still open."""
        if not all(self.votes.values()):
            return False
        if not self.missing:
            return True
        return False if now_s >= self.deadline_s else None


class Roster:
    """Heartbeats in, changes out; epochs by vote.

    Args:
        expected: ids that the job starts with.
        timeouts: see `Timeouts`.
        min_members: the job cannot go on with fewer.
        durable: a checkpoint exists that everyone can load.
        current: the membership that binds already, for a process that comes later.

    Attributes:
        proposed: what the open ballot is about.
        ballot: None when nothing is voted on.
    """

    def __init__(
        self,
        expected: Sequence[int],
        timeouts: Timeouts,
        *,
        min_members: int = 1,
        durable: bool = False,
        current: Membership = NOBODY,
    ) -> None:
        self.expected = tuple(sorted(expected))
        self.timeouts, self.min_members, self.durable = timeouts, min_members, durable
        self.current = current
        self.ballot: Ballot | None = None
        self.proposed = current
        self._seen_s: dict[Member, float] = {}
        self._steps: dict[Member, int] = {}
        self._told: set[Change] = set()

    def beat(self, member: Member, step: int, now_s: float) -> None:
        """A heartbeat: `step` steps committed, `NO_STATE` before any state is there."""
        newest = self._newest(member.id)
        if newest is not None and member.incarnation < newest.incarnation:
            return  # a late message of a process that was replaced
        self._seen_s[member], self._steps[member] = now_s, step

    def alive(self, now_s: float) -> tuple[Member, ...]:
        """The newest incarnation of each place that was heard of within `detect_s`."""
        heard = {m.id: self._newest(m.id) for m in self._seen_s}
        limit_s = self.timeouts.detect_s
        return tuple(
            member
            for _, member in sorted(heard.items())
            if member is not None and now_s - self._seen_s[member] <= limit_s
        )

    def changes(self, now_s: float) -> list[Change]:
        """What differs from the membership that binds or is voted on, those who left first.

        Each change is told once, and again after a proposal that does not take it up.
        """
        alive = self.alive(now_s)
        bound = self.current if self.ballot is None else self.proposed
        found = [Change("leave", m) for m in bound.members if m not in alive]
        found += [Change("join", m) for m in alive if m not in bound.members]
        fresh = [change for change in found if change not in self._told]
        self._told.update(fresh)
        return fresh

    @property
    def furthest_step(self) -> int:
        """Most steps that anyone told of; `NO_STATE` before."""
        return max(self._steps.values(), default=NO_STATE)

    def seen_s(self, member: Member) -> float:
        """When this member was last heard of; minus infinity before the first heartbeat."""
        return self._seen_s.get(member, -inf)

    def has_left(self, member: Member, now_s: float, since_s: float) -> bool:
        """Whether a member is gone, though it need not be heard of yet.

        Args:
            since_s: when something of its was first read, such as a decision: before its first
                heartbeat its silence counts from then on.
        """
        newest = self._newest(member.id)
        if newest is not None and newest.incarnation > member.incarnation:
            return True
        return now_s - self._seen_s.get(member, since_s) > self.timeouts.detect_s

    def heir(self, now_s: float) -> Member | None:
        """Who leads when the leader is gone: the lowest member alive that has the state."""
        alive = self.alive(now_s)
        able = [m for m in self.current.members if m in alive and self._steps[m] != NO_STATE]
        return able[0] if able else None

    def behind(self, members: Iterable[Member]) -> tuple[Member, ...]:
        """Those without a state; they fetch before they count."""
        return tuple(m for m in members if self._steps.get(m, NO_STATE) == NO_STATE)

    def propose(self, ids: Iterable[int], now_s: float, epoch: int | None = None) -> Membership:
        """Open the ballot on the next epoch with who holds these places now.

        Someone who has just fallen silent may be among them: the ballot is not won then, and
        `changes` tells why.

        Args:
            epoch: its number (None: one more than the current); numbers of proposals that came to
                nothing are skipped, never used again.

        Raises:
            WorldError: `world/membership` when a place was never taken, too few would remain, or
                nobody alive could give the state.
        """
        holders = {place: self._newest(place) for place in set(ids)}
        wanted = tuple(sorted(holders))
        epoch = self.current.epoch + 1 if epoch is None else epoch
        assert epoch > self.current.epoch, (epoch, self.current)
        where, empty = f"epoch {epoch}", [place for place in wanted if holders[place] is None]
        if empty:
            rule = f"nobody ever came to the places {empty}"
            raise WorldError("world/membership", where, wanted, rule)
        if len(wanted) < self.min_members:
            rule = f"needs at least {self.min_members} members"
            raise WorldError("world/membership", where, wanted, rule)
        members = tuple(member for _, member in sorted(holders.items()) if member is not None)
        self._require_donor(where, members, self.alive(now_s))
        self.proposed = Membership(epoch, members)
        self.ballot = Ballot(members, now_s + self.timeouts.init_s)
        self._told.clear()
        return self.proposed

    def commit(self, now_s: float) -> Membership:
        """The proposed epoch binds.

        Raises:
            WorldError: `world/membership` when its ballot has not been won, naming who is missing.
        """
        assert self.ballot is not None, "commit without a proposal"
        if self.ballot.verdict(now_s) is not True:
            missing = [member.id for member in self.ballot.missing]
            against = [member.id for member, yes in self.ballot.votes.items() if not yes]
            rule = f"not agreed: no vote of {missing}, against {against}"
            raise WorldError("world/membership", f"epoch {self.proposed.epoch}", None, rule)
        return self.adopt(self.proposed)

    def adopt(self, membership: Membership) -> Membership:
        """A membership that was committed elsewhere binds here too; older ones are ignored."""
        if membership.epoch > self.current.epoch:
            self.current, self.ballot = membership, None
            self._told.clear()
        return self.current

    def _newest(self, place: int) -> Member | None:
        return max((m for m in self._seen_s if m.id == place), default=None)

    def _require_donor(
        self, where: str, members: tuple[Member, ...], alive: tuple[Member, ...]
    ) -> None:
        before = [m for m in members if m in self.current.members and m in alive]
        if self.durable or len(self.behind(before)) < len(before):
            return
        ids = tuple(member.id for member in members)
        if self.current.epoch == 0 and ids == self.expected:
            return
        rule = (
            f"nobody has the state: a first epoch needs all of {self.expected}, a later one a "
            "member of the epoch before; otherwise a durable checkpoint"
        )
        raise WorldError("world/membership", where, ids, rule)
