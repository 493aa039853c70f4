"""A serving engine without tensors: what `SimWorld` needs to answer engine steps.

engine = SimEngine(requests, num_blocks=8, max_running=3, max_step_tokens=16)
world = SimWorld(mesh, cost, facts=engine.facts, outcomes=engine.outcomes)
world.post(*engine.arrivals())
drive(world, reacts=[policy])

`play_engine` plays one engine without a world around it: the same decisions and moments, no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.action import Action, Compute
from phalanx.errors import PlanError
from phalanx.mesh import Mesh
from phalanx.policy import Event, React, View

BLOCK_TOKENS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SimRequest:
    """A request whose output length is known to the simulation, but to no policy.

    Attributes:
        num_new: output tokens until it ends by itself, at most `max_new`.
    """

    id: int
    arrive_s: float
    prompt_len: int
    max_new: int
    num_new: int


@dataclass(slots=True)
class _Live:
    num_known: int
    num_left: int
    num_cached: int = 0


class SimEngine:
    """Lengths and blocks of the requests; every step accepts one token per whole prompt.

    Args:
        requests: what arrives when.
        num_blocks: KV blocks of 16 tokens.
        max_running, max_step_tokens: limits of a step.

    Attributes:
        facts: for the world; kept up to date.
        token_s: request -> when each of its output tokens was there.
        finish_s: request -> when it ended.
        num_preempted: caches that were dropped.
    """

    def __init__(
        self,
        requests: Sequence[SimRequest],
        *,
        num_blocks: int,
        max_running: int,
        max_step_tokens: int,
    ) -> None:
        self._requests = requests
        self._live = {each.id: _Live(each.prompt_len, each.num_new) for each in requests}
        self._limits = (max_running, max_step_tokens)
        self._num_held = 0  # blocks
        self.token_s: dict[int, list[float]] = {each.id: [] for each in requests}
        self.finish_s: dict[int, float] = {}
        self.num_preempted = 0
        self.facts: dict[str, Any] = {
            "num_blocks": num_blocks,
            "free_blocks": num_blocks,
            "block_tokens": BLOCK_TOKENS,
            "max_running": max_running,
            "max_step_tokens": max_step_tokens,
        }

    @property
    def outcomes(self) -> dict[str, Callable[[Action, Event], Sequence[Event]]]:
        """What the world's policies hear of an engine step."""
        return {"engine.step": self._outcome}

    def arrivals(self) -> list[Event]:
        """The events to post."""
        return [
            Event(
                kind="arrive",
                time_s=each.arrive_s,
                item=each.id,
                data={"prompt_len": each.prompt_len, "max_new": each.max_new},
            )
            for each in self._requests
        ]

    def _outcome(self, action: Action, done: Event) -> Sequence[Event]:
        assert isinstance(action, Compute)
        plan: Any = action.batch
        plan.require_legal(*self._limits)
        for request in plan.preempted:
            self._give_back(self._live[request])
            self.num_preempted += 1
        accepted = [self._compute(row, done.time_s) for row in plan.rows()]
        if self._num_held > self.facts["num_blocks"]:
            rule, legal = "the step needs more blocks than there are", [self.facts["num_blocks"]]
            raise PlanError("plan/illegal", "blocks", self._num_held, rule, legal=legal)
        ended = [each for each in plan.requests if not self._live[each].num_left]
        for request in ended:
            self._give_back(self._live.pop(request))
            self.finish_s[request] = done.time_s
        self.facts["free_blocks"] = self.facts["num_blocks"] - self._num_held
        data = {"requests": plan.requests, "accepted": accepted}
        step = Event(kind="step", time_s=done.time_s, label=action.label, data=data)
        return [step, *(Event(kind="finish", time_s=done.time_s, item=each) for each in ended)]

    def _compute(self, row: tuple[int, int, int], now_s: float) -> int:
        request, query_len, kv_len = row
        live = self._live.get(request)
        if live is None:
            raise PlanError("plan/illegal", "requests", request, "is no live request")
        end = kv_len + query_len
        if live.num_cached != kv_len or end > live.num_known:
            rule = f"request {request} holds {live.num_cached} of {live.num_known} tokens"
            raise PlanError("plan/illegal", "kv_len, query_len", (kv_len, query_len), rule)
        self._num_held += -(-end // BLOCK_TOKENS) - -(-kv_len // BLOCK_TOKENS)
        live.num_cached = end
        if end < live.num_known:
            return 0
        live.num_known += 1
        live.num_left -= 1
        self.token_s[request].append(now_s)
        return 1

    def _give_back(self, live: _Live) -> None:
        self._num_held -= -(-live.num_cached // BLOCK_TOKENS)
        live.num_cached = 0


def play_engine(engine: SimEngine, policy: React, batch_s: Callable[[Any], float]) -> None:
    """Let a policy drive an engine until nothing is left to do; the engine holds what happened.

    Args:
        engine: with all its requests still to come.
        policy: of the family "serve".
        batch_s: seconds of a batch plan.
    """
    waiting = sorted(engine.arrivals(), key=lambda event: event.time_s)[::-1]
    view = View(mesh=Mesh(engine=1), members=(0,), facts=engine.facts)
    state = policy.start(view)
    events: list[Event] = [Event(kind="start", time_s=0.0)]
    outcome = engine.outcomes["engine.step"]
    while True:
        actions = policy.on(state, events, view)
        if actions:
            (action,) = actions
            assert isinstance(action, Compute)
            view.now_s += batch_s(action.batch)
        elif waiting:
            view.now_s = max(view.now_s, waiting[-1].time_s)
        else:
            return
        events = []
        while waiting and waiting[-1].time_s <= view.now_s:
            events.append(waiting.pop())
        if actions:
            done = Event(kind="done", time_s=view.now_s, label=action.label)
            events += outcome(action, done)
