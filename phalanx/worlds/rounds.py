"""One leader decides for all ranks of a world, through the store.

A round: every rank tells what happened to it; the lowest rank, the leader, merges it in rank order
and says whether there is more to come; then, once per policy, it publishes (epoch, seq, actions)
and the others carry them out. All messages are JSON.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from phalanx.action import Action
from phalanx.errors import WorldError
from phalanx.policy import Event
from phalanx.worlds.action_json import actions_from_json, actions_to_json
from phalanx.worlds.pulse import Pulse, wait_for

_EPOCH = 0  # a world's ranks never change; memberships that do are `membership_store`'s


class Rounds:
    """One rank's side.

    Args:
        store: a torch store that all ranks share.
        name: prefix of the keys.
        ranks: who takes part; the lowest one leads.
        pulse: of this rank.
        timeout_s: how long a rank may keep the others waiting.
    """

    def __init__(
        self, store: Any, name: str, ranks: Sequence[int], pulse: Pulse, timeout_s: float
    ) -> None:
        self._store, self._name, self._ranks = store, f"{name}/rounds", tuple(ranks)
        self._pulse, self._timeout_s = pulse, timeout_s
        self._leader = min(ranks)
        self._round = self._seq = 0
        self._keys: deque[list[str]] = deque([[]])

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self._pulse.rank == self._leader

    def gather(self, events: Sequence[Event]) -> list[Event]:
        """What happened on all ranks, the same on each; [] when nothing did.

        Raises:
            WorldError: `world/timeout` naming the ranks that did not report.
        """
        head = self._begin_round()
        mine, merged = f"{head}/{self._pulse.rank}", f"{head}/merged"
        self._set(mine, [asdict(event) for event in events])
        if self.leads:
            keys = {f"{head}/{rank}": rank for rank in self._ranks}
            self._await(keys, "events")
            everything = [each for key in keys for each in self._get(key)]
            self._set(merged, everything)
        else:
            self._await({merged: self._leader}, "the round's events")
            everything = self._get(merged)
        return [Event(**each) for each in everything]

    def decide(self, decide: Callable[[], list[Action]]) -> list[Action]:
        """The leader's decision number `seq`.

        Raises:
            WorldError: `world/timeout` naming the leader.
        """
        key, self._seq = f"{self._name}/decision/{_EPOCH}.{self._seq}", self._seq + 1
        if self.leads:
            self._set(key, actions_to_json(decide()))
        else:
            self._await({key: self._leader}, f"decision {_EPOCH}.{self._seq - 1}")
        return actions_from_json(self._get(key))

    def _await(self, keys: dict[str, int], what: str) -> None:
        missing = wait_for(self._store, list(keys), self._pulse, self._timeout_s)
        if not missing:
            return
        late = keys[missing[0]]
        role = "the leader, " if late == self._leader else ""
        rule = f"{role}did not send {what} within {self._timeout_s:g} s"
        detail = f"rank {late} was last in: {self._pulse.last_words(late)}"
        raise WorldError("world/timeout", f"rank {late}", None, rule, detail=detail)

    def _begin_round(self) -> str:
        """Prefix of the round's keys. Those of the round before the last have been read by all."""
        self._keys.append([])
        while len(self._keys) > 2:
            for key in self._keys.popleft():
                self._store.delete_key(key)
        self._round += 1
        return f"{self._name}/{self._round}"

    def _set(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))
        self._keys[-1].append(key)

    def _get(self, key: str) -> Any:
        return json.loads(self._store.get(key))
