"""Replicas leave and come back without stopping the others: catch-up with a zero contribution.

Decides, step by step, who computes, who exchanges in which epoch, from whom a replica that comes
back takes its state, and whether the step counts. A replica that lost a rank leaves as a whole; the
others redo the step in a new epoch, and the one that comes back joins at the start of a step.

Symbols
    R           replicas: size of `axis` in the mesh; members, contributors: places on that axis
    n           the step under way; view.step of them are committed
    T, d, s     seconds between failures, that a failed replica is away, that all stand still
    b           view.facts["grad_bytes"]: gradients of one rank
    w           view.facts["state_bytes"]: parameters and optimizer state of one rank

Step n in epoch e: every contributor computes its gradient, every replica that is behind contributes
zeros and meanwhile receives the state at the start of step n; all-reduce over the members; vote;
when all said yes, those behind load the state and everyone applies sum / number of CONTRIBUTORS.
Zeros do not change the sum and the loaded state is the peer's, so all are equal after the step.

Cost
    payload per rank and step                       b, and w once per join on its peer
    effective time, all restart together            (T - d) / T
    effective time, one replica is away             ((T - d) + (d - s) * (R - 1) / R) / T
    learning-rate factor                            sqrt(contributors / R)

Source: FT-HSDP, arXiv 2602.00277: catch-up, two-phase decision, learning-rate rule and the
effective-time arithmetic.

Differences and limits: one vote over all members instead of one inside each replica, so either all
commit or all redo; a redo always takes a new epoch, because a group in which an exchange failed is
never used again. A transfer of state that takes longer than a step delays that step; the paper
retries at a later one. A leader that takes over starts anew from the view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt

from phalanx.action import Action
from phalanx.errors import PlanError, WorldError
from phalanx.policies.recover.replica_step import ReplicaStep
from phalanx.policy import Event, React, View
from phalanx.registry import Source, register

LR_RULES = ("none", "linear", "sqrt")


def effective_frac_restart(failure_s: float, away_s: float) -> float:
    """E_sync: share of the time that trains when everyone waits for the failed replica."""
    return (failure_s - away_s) / failure_s


def effective_frac_rejoin(
    failure_s: float, away_s: float, stall_s: float, num_replicas: int
) -> float:
    """E_ft: share of the time that trains when only the failed replica is away.

    Args:
        failure_s: T, between two failures, evenly spaced.
        away_s: d, that the failed replica is missing.
        stall_s: s <= d, that everyone stands still.
        num_replicas: R.
    """
    others = (num_replicas - 1) / num_replicas
    return ((failure_s - away_s) + (away_s - stall_s) * others) / failure_s


@dataclass(slots=True)
class RejoinState:
    """Steps committed, and places on the axis: `members` are contributors and those behind,
    `waiting` want to join, `votes` are ranks that have voted for the step under way."""

    step: int
    epoch: int
    members: tuple[int, ...]
    behind: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    votes: set[int] = field(default_factory=set)


@register(
    "recover",
    "rejoin",
    grain="step",
    source=Source("FT-HSDP", "arXiv 2602.00277", "catch-up of a replica, abstract and mechanism"),
)
@dataclass(frozen=True, kw_only=True)
class Rejoin(React):
    """The options.

    Attributes:
        axis: mesh axis of the replicas.
        lr_rule: one of `LR_RULES`: how the learning rate follows the missing replicas.
        min_replicas: contributors that a step needs.

    Raises:
        PlanError: `plan/illegal` for an unknown rule.
    """

    axis: str = "replica"
    lr_rule: str = "sqrt"
    min_replicas: int = 1

    def __post_init__(self) -> None:
        if self.lr_rule not in LR_RULES:
            where, rule = "policy.recover.lr_rule", "no such rule"
            raise PlanError("plan/illegal", where, repr(self.lr_rule), rule, legal=LR_RULES)

    def lr_factor(self, num_contributors: int, num_replicas: int) -> float:
        """What the learning rate is multiplied with while replicas are missing."""
        share = num_contributors / num_replicas
        return {"none": 1.0, "linear": share, "sqrt": sqrt(share)}[self.lr_rule]

    def start(self, view: View) -> RejoinState:
        return RejoinState(view.step, view.epoch, self._places(view.members, view))

    def on(self, state: RejoinState, events: Sequence[Event], view: View) -> list[Action]:
        actions: list[Action] = []
        for event in events:
            if event.kind == "start":
                actions += self._restart(state, event, view)
            elif event.kind == "leave":
                actions += self._leave(state, view.mesh.coordinate(event.rank, self.axis), view)
            elif event.kind == "join":
                joined = self._places((event.rank,), view)
                state.waiting = tuple(sorted({*state.waiting, *joined} - {*state.members}))
            elif event.kind == "done" and event.label == self._step(state, view).label("vote"):
                actions += self._voted(state, event, view)
        return actions

    def _restart(self, state: RejoinState, event: Event, view: View) -> list[Action]:
        state.step, state.epoch = view.step, view.epoch
        state.members = self._places(view.members, view)
        state.behind = self._places(event.data.get("behind", ()), view)
        return self._new_epoch(state, view)

    def _leave(self, state: RejoinState, place: int, view: View) -> list[Action]:
        state.waiting = tuple(m for m in state.waiting if m != place)
        if place not in state.members:
            return []
        state.members = tuple(m for m in state.members if m != place)
        state.behind = tuple(m for m in state.behind if m != place)
        return self._new_epoch(state, view)

    def _voted(self, state: RejoinState, event: Event, view: View) -> list[Action]:
        if not event.data.get("yes", True):
            return self._new_epoch(state, view)
        step, mesh = self._step(state, view), view.mesh
        if event.rank >= 0:  # a world that reports each rank's vote, not the whole scope's
            state.votes.add(event.rank)
            num_voters = len(step.members) * (mesh.size // mesh.degree(self.axis))
            if len(state.votes) < num_voters:
                return []
        actions = step.commit(self.lr_factor(len(step.contributors), mesh.degree(self.axis)))
        state.step, state.behind = state.step + 1, ()
        state.votes.clear()
        if state.waiting:
            state.members = tuple(sorted({*state.members, *state.waiting}))
            state.behind, state.waiting = state.waiting, ()
            return actions + self._new_epoch(state, view)
        return (
            actions if self._is_over(state, view) else actions + self._step(state, view).attempt()
        )

    def _new_epoch(self, state: RejoinState, view: View) -> list[Action]:
        if self._is_over(state, view):
            return []
        state.epoch += 1
        state.votes.clear()
        step = self._step(state, view)
        if len(step.contributors) < max(1, self.min_replicas):
            where, rule = "policy.recover.min_replicas", "too few replicas have the state"
            raise WorldError("world/membership", where, len(step.contributors), rule)
        return step.form() + step.attempt(after=(step.label("form"),))

    def _step(self, state: RejoinState, view: View) -> ReplicaStep:
        return ReplicaStep(
            mesh=view.mesh,
            axis=self.axis,
            facts=view.facts,
            step=state.step + 1,
            epoch=state.epoch,
            contributors=tuple(m for m in state.members if m not in state.behind),
            behind=state.behind,
        )

    def _is_over(self, state: RejoinState, view: View) -> bool:
        return state.step >= view.facts["num_steps"]

    def _places(self, ranks: Sequence[int], view: View) -> tuple[int, ...]:
        return tuple(sorted({view.mesh.coordinate(rank, self.axis) for rank in ranks}))
