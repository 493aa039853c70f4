"""Streaming outer synchronisation: one fragment at a time, overlapped with the inner steps.

Decides after which inner step the outer gradient of which fragment of the model is exchanged, and
after which later step its result is applied. Training goes on in between: the exchange has a lane
of its own, and only the apply waits for it.

Symbols
    H           inner_steps      inner steps between two exchanges of one fragment
    P           num_fragments    parts of the model that are exchanged one after another
    tau         overlap_steps    inner steps between the start of an exchange and its apply
    alpha       blend            weight of the local parameters when the result comes in
    eta, mu     outer_lr, outer_momentum of the Nesterov step on a fragment's outer parameters
    b_p         view.facts["fragment_bytes"][p]: bytes that one exchange of fragment p carries
    K           islands that contribute: members of the group along `axis`
    t, t_p      inner steps done; offset of fragment p, floor(p * H / P)

Fragment p starts its exchange after step t when (t - t_p) mod H == 0 and t - t_p >= H, so every
fragment does H steps first and then keeps a period of exactly H, whatever H / P is. For H = 100 and
P = 2: {100, 200, ...} and {150, 250, ...}.

Cost
    payload per rank over H steps (steady state)    sum of b_p, as without fragments
    peak payload of one exchange                    max of b_p, instead of their sum
    exchange hidden when                            exchange time <= tau * inner step time
    memory beside the inner optimizer               2 * sum of b_p (outer parameters and momentum)

Source: Streaming DiLoCo, arXiv 2501.18512, Algorithm 2 and Section 2. With P = 1, tau = 0 and
alpha = 0 it is DiLoCo, arXiv 2311.08105, Algorithm 1.

Differences and limits: the text of the paper also writes (t + t_p); the algorithm's minus is meant.
An exchange is one all-reduce in the precision of b_p, not an all-gather of 4-bit values. What is in
flight when the membership changes is dropped by everyone: the next outer gradient is again measured
from the old outer parameters, so no contribution is lost, only late. Exchanges still in flight
after the last inner step are never applied. A joining island needs the outer parameters and the
momentum of a peer first; a policy of family recover brings them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from phalanx.action import Action, Collective, Compute
from phalanx.errors import PlanError
from phalanx.policy import Event, React, View
from phalanx.registry import Source, register


class _Flight(NamedTuple):
    """An exchange under way: its fragment, and the steps after which it starts and is applied."""

    fragment: int
    from_step: int
    to_step: int

    @property
    def label(self) -> str:
        return f"exchange.{self.fragment}@{self.from_step}"


@dataclass(slots=True)
class StreamingState:
    """Inner steps seen, and the exchanges under way, oldest first."""

    step: int = 0
    flights: list[_Flight] = field(default_factory=list)


@register(
    "sync",
    "streaming",
    grain="step",
    source=Source("Streaming DiLoCo", "arXiv 2501.18512", "Algorithm 2"),
)
@dataclass(frozen=True, kw_only=True)
class Streaming(React):
    """The options, named above.

    Raises:
        PlanError: `plan/illegal` for an option outside its range.
    """

    inner_steps: int
    num_fragments: int = 1
    overlap_steps: int = 0
    blend: float = 0.0
    outer_lr: float = 0.4
    outer_momentum: float = 0.9
    axis: str = "island"

    def __post_init__(self) -> None:
        _require_range("inner_steps", self.inner_steps, 1, None)
        _require_range("num_fragments", self.num_fragments, 1, self.inner_steps)
        _require_range("overlap_steps", self.overlap_steps, 0, self.inner_steps - 1)
        _require_range("blend", self.blend, 0.0, 1.0)

    def due(self, step: int) -> list[int]:
        """Fragments whose exchange starts after inner step `step`, counted from 1."""
        offsets = [p * self.inner_steps // self.num_fragments for p in range(self.num_fragments)]
        since = [step - offset for offset in offsets]
        return [
            p for p, t in enumerate(since) if t >= self.inner_steps and t % self.inner_steps == 0
        ]

    def start(self, view: View) -> StreamingState:
        num_sizes = len(view.facts["fragment_bytes"])
        if num_sizes != self.num_fragments:
            where, rule = "policy.sync.num_fragments", f"the model is cut into {num_sizes}"
            raise PlanError("plan/illegal", where, self.num_fragments, rule, legal=[num_sizes])
        return StreamingState()

    def on(self, state: StreamingState, events: Sequence[Event], view: View) -> list[Action]:
        actions: list[Action] = []
        for event in events:
            if event.kind in ("leave", "join"):
                state.flights.clear()
            elif event.kind == "step" and event.item > state.step:
                state.step = event.item
                actions += self._after_step(state, view)
        return actions

    def _after_step(self, state: StreamingState, view: View) -> list[Action]:
        step, tau = state.step, self.overlap_steps
        launched = [_Flight(fragment, step, step + tau) for fragment in self.due(step)]
        state.flights += launched
        landed = [flight for flight in state.flights if flight.to_step <= step]
        state.flights = [flight for flight in state.flights if flight.to_step > step]
        actions: list[Action] = []
        for members in _groups(view, self.axis):
            for flight in launched:
                actions += self._exchange(flight, members, view)
            actions += [self._apply(flight, members, view) for flight in landed]
        return actions

    def _exchange(self, flight: _Flight, members: tuple[int, ...], view: View) -> list[Action]:
        p, num_bytes = flight.fragment, view.facts["fragment_bytes"][flight.fragment]
        delta = Compute(
            op="outer.delta",
            label=f"delta.{p}@{flight.from_step}",
            phase="O",
            item=p,
            moved_bytes=3.0 * num_bytes,  # reads outer and local parameters, writes the delta
            batch={"fragment": p},
            ranks=members,
        )
        exchange = Collective(
            collective="all_reduce",
            axis=self.axis,
            lane=f"axis:{self.axis}",
            label=flight.label,
            after=(delta.label,),
            phase="O",
            item=p,
            tensor=f"fragment.{p}/delta",
            payload_bytes=num_bytes,
            members=members,
            epoch=view.epoch,
            ranks=members,
        )
        return [delta, exchange]

    def _apply(self, flight: _Flight, members: tuple[int, ...], view: View) -> Action:
        batch = {
            "fragment": flight.fragment,
            "num_contributors": len(members) or view.mesh.degree(self.axis),
            "lr": self.outer_lr,
            "momentum": self.outer_momentum,
            "blend": self.blend,
        }
        return Compute(
            op="outer.apply",
            label=f"apply.{flight.fragment}@{flight.from_step}",
            after=(flight.label,),
            phase="O",
            item=flight.fragment,
            # reads delta, outer, momentum and local parameters, writes the last three
            moved_bytes=7.0 * view.facts["fragment_bytes"][flight.fragment],
            batch=batch,
            ranks=members,
        )


def _groups(view: View, axis: str) -> list[tuple[int, ...]]:
    """The groups along `axis`; [()] while everyone is there: each rank's own group."""
    if len(view.members) == view.mesh.size:
        return [()]
    alive = set(view.members)
    groups = [tuple(r for r in group if r in alive) for group in view.mesh.groups(axis)]
    return [group for group in groups if group]


def _require_range(name: str, value: float, low: float, high: float | None) -> None:
    if value < low or (high is not None and value > high):
        rule = f"must be at least {low}" if high is None else f"must lie in {low}..{high}"
        nearest = low if high is None or value < low else high
        raise PlanError("plan/illegal", f"policy.sync.{name}", value, rule, legal=[nearest])
