"""One step of replicas that come and go, as actions: attempt, catch-up, commit.

Labels are kind@step.epoch, but commit@step: a step is tried in several epochs and committed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.action import Action, Collective, Compute, Mark, Move, Recv, Send
from phalanx.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStep:
    """Attributes:
    mesh, axis: the grid, and its axis of replicas; places are coordinates on it.
    facts: "grad_bytes" and "state_bytes" of one rank.
    step: the one under way; the ones before it are committed.
    epoch: of the membership that tries it.
    contributors: places that compute.
    behind: places that contribute zeros and receive the state at the start of the step.
    """

    mesh: Mesh
    axis: str
    facts: Mapping[str, Any]
    step: int
    epoch: int
    contributors: tuple[int, ...]
    behind: tuple[int, ...] = ()

    @property
    def members(self) -> tuple[int, ...]:
        """Everyone in the exchange."""
        return tuple(sorted(self.contributors + self.behind))

    def label(self, kind: str) -> str:
        """kind@step.epoch."""
        return f"{kind}@{self.step}.{self.epoch}"

    def form(self) -> list[Action]:
        """The epoch's group is built while the contributors compute."""
        batch = {"epoch": self.epoch, "members": self.members, "behind": self.behind}
        return self._ops("membership.form", "form", self.members, lane="control", batch=batch)

    def attempt(self, after: Sequence[str] = ()) -> list[Action]:
        """Everything up to the vote; `after`: what the exchange waits for beside the gradients."""
        actions = self._ops("grad", "grad", self.contributors, phase="B")
        actions += self._ops("grad.zero", "grad", self.behind)
        actions += self._catch_up()
        for group in self.mesh.groups(self.axis):
            members = tuple(group[place] for place in self.members)
            actions.append(self._exchange(members, after))
        both = (self.label("exchange"), self.label("state"))
        actions += self._ops("vote", "vote", self.contributors, lane="control", after=both[:1])
        actions += self._ops("vote", "vote", self.behind, lane="control", after=both)
        return actions

    def commit(self, lr_factor: float) -> list[Action]:
        """Those behind load the state; everyone applies sum / number of contributors."""
        ranks, label = self._ranks(self.members), f"commit@{self.step}"
        batch = {
            "num_contributors": len(self.contributors),
            "contributors": self.contributors,
            "lr_factor": lr_factor,
        }
        update = Compute(
            op="update", label=label, phase="O", item=self.step, batch=batch, ranks=ranks
        )
        mark = Mark(name="commit", value=self.step, item=self.step, ranks=ranks)
        return [*self._ops("state.load", "load", self.behind), update, mark]

    def _exchange(self, members: tuple[int, ...], after: Sequence[str]) -> Action:
        return Collective(
            collective="all_reduce",
            axis=self.axis,
            lane=f"axis:{self.axis}",
            label=self.label("exchange"),
            after=(self.label("grad"), *after),
            item=self.step,
            tensor="grad",
            payload_bytes=self.facts["grad_bytes"],
            members=members,
            epoch=self.epoch,
            ranks=members,
        )

    def _catch_up(self) -> list[Action]:
        """A source copies its state first, so that it may commit while the copy is on its way."""
        givers = self.contributors
        source_of = {place: givers[i % len(givers)] for i, place in enumerate(self.behind)}
        actions = [self._copy(source) for source in dict.fromkeys(source_of.values())]
        common: dict[str, Any] = {"axis": self.axis, "tensor": "state", "item": self.step}
        common |= {"payload_bytes": self.facts["state_bytes"]}
        for place, source in source_of.items():
            send = Send(
                **common,
                peer=place,
                lane=f"send:{self.axis}:{place}",
                label=self.label(f"state.{place}"),
                after=(self.label("copy"),),
                ranks=self._ranks((source,)),
            )
            recv = Recv(
                **common,
                peer=source,
                lane=f"recv:{self.axis}:{source}",
                label=self.label("state"),
                ranks=self._ranks((place,)),
            )
            actions += [send, recv]
        return actions

    def _copy(self, source: int) -> Action:
        return Move(
            tensor="state",
            source="device",
            target="host",
            lane="copy",
            label=self.label("copy"),
            after=(f"commit@{self.step - 1}",) if self.step > 1 else (),
            item=self.step,
            payload_bytes=self.facts["state_bytes"],
            ranks=self._ranks((source,)),
        )

    def _ops(self, op: str, label: str, places: tuple[int, ...], **more: Any) -> list[Action]:
        """The op on the ranks of these places; nothing without places."""
        if not places:
            return []
        ranks = self._ranks(places)
        return [Compute(op=op, label=self.label(label), item=self.step, ranks=ranks, **more)]

    def _ranks(self, places: tuple[int, ...]) -> tuple[int, ...]:
        mesh = self.mesh
        return tuple(r for r in range(mesh.size) if mesh.coordinate(r, self.axis) in places)
