"""A serving scheduler: one request at a time, the one with the shortest prompt first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx.action import Action, Compute
from phalanx.policies.serve import ENGINE_STEP, BatchPlan, require_room
from phalanx.policy import Event, React, View
from phalanx.registry import Source, register


@dataclass(slots=True)
class Served:
    """Waiting requests as (prompt tokens, id), and the one being served."""

    waiting: list[tuple[int, int]] = field(default_factory=list)
    request: int = -1
    known: int = 0  # prompt and output tokens so far
    cached: int = 0
    query: int = 0  # tokens of the step under way


@register("serve", "shortest-first", grain="step", source=Source("a recipe of Phalanx", "none"))
@dataclass(frozen=True, kw_only=True)
class ShortestFirst(React):
    """Serves whole requests one after another, short prompts before long ones.

    Symbols: T = view.facts["max_step_tokens"]; n = prompt tokens; k = output tokens.
    Costs: ceil(n / T) + k - 1 steps a request; the mean wait is the least of any order without
    batching when all outputs are equally long.
    Source: none, it is a recipe (shortest job first).
    Differences and limits: no batching, no preemption; long prompts may wait for ever.
    """

    scope = "engine"

    def start(self, view: View) -> Served:
        return Served()

    def on(self, state: Served, events: Sequence[Event], view: View) -> list[Action]:
        for event in events:
            if event.kind == "arrive":
                require_room(event, view)
                state.waiting.append((event.data["prompt_len"], event.item))
            elif event.kind == "step":
                state.cached += state.query
                state.known += int(sum(event.data["accepted"]))
                state.query = 0
            elif event.kind in ("finish", "cancel"):
                self._forget(state, event.item)
        return [] if state.query else self._next(state, view)

    def _forget(self, state: Served, request: int) -> None:
        state.waiting = [entry for entry in state.waiting if entry[1] != request]
        if state.request == request:
            state.request = -1

    def _next(self, state: Served, view: View) -> list[Action]:
        if state.request < 0:
            if not state.waiting:
                return []
            shortest = min(state.waiting)
            state.waiting.remove(shortest)
            state.known, state.request = shortest
            state.cached = 0
        state.query = min(state.known - state.cached, view.facts["max_step_tokens"])
        plan = BatchPlan(
            requests=[state.request],
            query_len=[state.query],
            kv_len=[state.cached],
            num_draft=[0],
            adapter=[-1],
            grammar=[-1],
        )
        label = f"{state.request}@{state.cached}"
        return [Compute(op=ENGINE_STEP, label=label, num_tokens=state.query, batch=plan)]
