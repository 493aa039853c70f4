"""A membership over a store that outlives its members: heartbeats, votes, epochs, decisions.

The store (a TCPStore) is hosted by a process that is no member, such as the launcher. What binds is
written with compare-and-set, so two members that both believe to lead cannot both decide. The rules
are those of `membership`; this file only carries them.

    membership = MembershipStore(store, my_id=1, expected=(0, 1, 2), timeouts=Timeouts())
    membership.start()                          # heartbeats from a thread of their own
    for change in membership.changes(): ...     # "leave" and "join", by heartbeat alone
    membership.vote("step 7", yes=True)
    membership.close()

Keys below `name`: incarnation/<id>, beat/<id> (incarnation:count:step), vote/<ballot>/<id>,
epoch (the membership that binds), log/<seq> (decisions of the leaders, one list for all).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from math import inf
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from phalanx.errors import WorldError
from phalanx.membership import (
    NO_STATE,
    NOBODY,
    Ballot,
    Change,
    Member,
    Membership,
    Roster,
    Timeouts,
)


class MembershipStore:
    """One member's side. Only the heartbeat runs in a thread; all else is called by the owner.

    Args:
        store: cloned, so that a long wait elsewhere never holds up a heartbeat.
        my_id: this member's place.
        expected: places that the job starts with.
        timeouts: see `membership.Timeouts`.
        durable: a checkpoint exists that everyone can load.
        min_members: the job cannot go on with fewer.
        name: prefix of the keys; jobs that share a store differ in it.

    Attributes:
        me: this process; its incarnation is one more than the last one in this place.
        roster: what the heartbeats say.
        now_s: the roster's clock. It stands still while this process does not listen or the store
            does not answer: silence counts only where a heartbeat would have been heard.
        step: steps committed, told with every heartbeat; `NO_STATE` before there is a state.
        first_seq: the decisions before this one are older than this process.
    """

    def __init__(
        self,
        store: TCPStore,
        my_id: int,
        expected: Sequence[int],
        timeouts: Timeouts,
        *,
        durable: bool = False,
        min_members: int = 1,
        name: str = "membership",
    ) -> None:
        self.timeouts, self.name = timeouts, name
        self._store, self._beat_store = store.clone(), store.clone()
        self.me = Member(my_id, self._ask("add", f"incarnation/{my_id}", 1))
        self.step = NO_STATE
        self.first_seq = self.num_decisions()
        self.roster = Roster(
            expected, timeouts, min_members=min_members, durable=durable, current=self.committed()
        )
        self._last_beats: dict[int, str] = {}
        self.now_s, self._listened_s = 0.0, -inf
        self._stop = threading.Event()
        self._lost: RuntimeError | None = None
        self._thread = threading.Thread(target=self._beat_forever, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to send heartbeats."""
        self._thread.start()

    def close(self) -> None:
        """Stop the heartbeats; to the others this is a leave."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(self.timeouts.detect_s)

    def poll(self) -> float:
        """Read all heartbeats, unless that was just done; returns the time by `now_s`.

        Raises:
            WorldError: `world/dead` when the store does not answer any more.
        """
        if self._lost is not None:
            raise self._gone(self._lost)
        if time.monotonic() - self._listened_s < self.timeouts.heartbeat_s / 4:
            return self.now_s
        beats = {place: self._get(f"beat/{place}") for place in self.roster.expected}
        listened_s = time.monotonic()
        self.now_s += min(listened_s - self._listened_s, self.timeouts.heartbeat_s)
        self._listened_s = listened_s
        for place, beat in beats.items():
            if beat is not None and beat != self._last_beats.get(place):
                self._last_beats[place] = beat
                incarnation, _, step = map(int, beat.split(":"))
                self.roster.beat(Member(place, incarnation), step, self.now_s)
        return self.now_s

    def changes(self) -> list[Change]:
        """Who left and who wants to join since the last call."""
        return self.roster.changes(self.poll())

    def inherits_from(self, leader: Member | None, since_s: float) -> bool:
        """Whether this process has to lead now, because `leader` is gone or nobody led before.

        Args:
            since_s: when its latest decision was read, by `now_s`.
        """
        roster = self.roster
        if roster.current == NOBODY:
            return leader is None and self.me.id == min(roster.expected)
        is_open = leader is None or roster.has_left(leader, self.now_s, since_s)
        return is_open and roster.heir(self.now_s) == self.me

    def vote(self, ballot: str, yes: bool) -> None:
        """Say yes or no, once; it cannot be taken back."""
        self._claim(f"vote/{ballot}/{self.me.id}/{self.me.incarnation}", "yes" if yes else "no")

    def count_votes(self, name: str, ballot: Ballot) -> bool | None:
        """Read the votes that are missing; the verdict so far."""
        for voter in ballot.missing:
            vote = self._get(f"vote/{name}/{voter.id}/{voter.incarnation}")
            if vote is not None:
                ballot.vote(voter, vote == "yes")
        return ballot.verdict(self.now_s)

    def committed(self) -> Membership:
        """The membership that binds; `NOBODY` before the first."""
        text = self._get("epoch")
        return NOBODY if text is None else membership_of(json.loads(text))

    def bind(self, membership: Membership) -> bool:
        """Make a proposal that everyone agreed to bind; False if another one came first."""
        before, after = self.roster.current, json.dumps(membership)
        expected = "" if before == NOBODY else json.dumps(before)
        return self._swap("epoch", expected, after)

    def append(self, seq: int, decision: dict[str, Any]) -> bool:
        """Write decision number `seq`; False if another leader wrote that number first."""
        if not self._claim(f"log/{seq}", json.dumps(decision)):
            return False
        self._ask("add", "length", 1)
        return True

    def decision(self, seq: int) -> dict[str, Any] | None:
        """Decision number `seq`, if it has been taken."""
        text = self._get(f"log/{seq}")
        return None if text is None else json.loads(text)

    def num_decisions(self) -> int:
        """How many have been taken; the newest may not be counted yet."""
        return self._ask("add", "length", 0)

    def _claim(self, key: str, value: str) -> bool:
        """Write a key that nobody may have written before; whether it holds this value now."""
        return self._swap(key, "", value)

    def _swap(self, key: str, before: str, after: str) -> bool:
        return self._ask("compare_set", key, before, after) == after.encode()

    def _get(self, key: str) -> str | None:
        if not self._ask("check", key):
            return None
        return self._ask("get", key).decode()

    def _ask(self, method: str, key: str, *values: Any) -> Any:
        key = f"{self.name}/{key}"
        try:
            return getattr(self._store, method)([key] if method == "check" else key, *values)
        except (DistNetworkError, DistStoreError) as error:
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> WorldError:
        rule = "the store of the membership does not answer; nobody can decide without it"
        return WorldError("world/dead", self.name, None, rule, detail=str(error))

    def _beat_forever(self) -> None:
        count = 0
        try:
            while not self._stop.is_set():
                beat = f"{self.me.incarnation}:{count}:{self.step}"
                self._beat_store.set(f"{self.name}/beat/{self.me.id}", beat)
                count += 1
                self._stop.wait(self.timeouts.heartbeat_s)
        except (DistNetworkError, DistStoreError) as error:
            self._lost = error


def membership_of(value: Sequence[Any]) -> Membership:
    """A membership from its JSON form, [epoch, [[id, incarnation], ...]]."""
    epoch, members = value
    return Membership(epoch, tuple(Member(*each) for each in members))
