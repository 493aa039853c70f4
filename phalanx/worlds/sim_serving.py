"""A serving engine without tensors: what `SimWorld` needs to answer engine steps.

engine = SimEngine(requests, num_blocks=8, max_running=3, max_step_tokens=16)
world = SimWorld(mesh, cost, facts=engine.facts, outcomes=engine.outcomes)
world.post(*engine.arrivals())
drive(world, reacts=[policy])

`play_engine` plays one engine without a world around it: the same decisions and moments, no trace.

Where requests name blocks that they share, the engine keeps an automatic prefix cache
(`sim_prefixes`): full blocks only, and at least one token of a request is always computed. A plan
whose `kv_len` is above 0 for a request without a cache takes blocks from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phalanx.action import Action, Compute
from phalanx.errors import PlanError
from phalanx.mesh import Mesh
from phalanx.policy import Event, React, View
from phalanx.worlds.sim_prefixes import PrefixCache

BLOCK_TOKENS = 16
_NO_KEYS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class SimRequest:
    """A request whose output length is known to the simulation, but to no policy.

    Attributes:
        num_new: output tokens until it ends by itself, at most `max_new`.
        prefix_keys: of the prompt's full blocks, from the first on: what others may share.
    """

    id: int
    arrive_s: float
    prompt_len: int
    max_new: int
    num_new: int
    prefix_keys: np.ndarray = field(default_factory=lambda: _NO_KEYS, compare=False)


@dataclass(slots=True)
class _Live:
    num_known: int
    num_left: int
    prefix_keys: np.ndarray
    num_cached: int = 0
    keyed: list[np.ndarray] = field(default_factory=list)  # blocks that it holds in the cache


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
        reused_tokens: request -> tokens that its first step found in the prefix cache.
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
        self._live = {
            each.id: _Live(each.prompt_len, each.num_new, each.prefix_keys) for each in requests
        }
        self._limits = (max_running, max_step_tokens)
        self._num_own = 0  # blocks that only their request knows
        num_keys = max((int(each.prefix_keys.max(initial=-1)) for each in requests), default=-1) + 1
        self._prefixes = PrefixCache(num_keys) if num_keys else None
        self.token_s: dict[int, list[float]] = {each.id: [] for each in requests}
        self.finish_s: dict[int, float] = {}
        self.num_preempted = 0
        self.reused_tokens: dict[int, int] = {}
        self.facts: dict[str, Any] = {
            "num_blocks": num_blocks,
            "free_blocks": num_blocks,
            "block_tokens": BLOCK_TOKENS,
            "max_running": max_running,
            "max_step_tokens": max_step_tokens,
        }
        if self._prefixes is not None:
            self.facts["reuse"] = self._reusable

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
        num_blocks = self.facts["num_blocks"]
        if self._num_held > num_blocks:
            rule, legal = "the step needs more blocks than there are", [num_blocks]
            raise PlanError("plan/illegal", "blocks", self._num_held, rule, legal=legal)
        if self._prefixes is not None:
            self._prefixes.drop(max(0, self._num_held + self._prefixes.num_idle - num_blocks))
        ended = [each for each in plan.requests if not self._live[each].num_left]
        for request in ended:
            self._give_back(self._live.pop(request))
            self.finish_s[request] = done.time_s
        self.facts["free_blocks"] = num_blocks - self._num_held
        data = {"requests": plan.requests, "accepted": accepted}
        step = Event(kind="step", time_s=done.time_s, label=action.label, data=data)
        return [step, *(Event(kind="finish", time_s=done.time_s, item=each) for each in ended)]

    @property
    def _num_held(self) -> int:
        """Blocks that live requests hold, shared ones once."""
        return self._num_own + (self._prefixes.num_held if self._prefixes else 0)

    def _reusable(self, request: int) -> tuple[int, int]:
        """Tokens of a request without a cache that are here, and how many of their blocks are
        held."""
        assert self._prefixes is not None
        live = self._live[request]
        keys = live.prefix_keys[: (live.num_known - 1) // BLOCK_TOKENS]
        keys = keys[: self._prefixes.num_leading(keys)]
        return len(keys) * BLOCK_TOKENS, self._prefixes.num_held_of(keys)

    def _compute(self, row: tuple[int, int, int], now_s: float) -> int:
        request, query_len, kv_len = row
        live = self._live.get(request)
        if live is None:
            raise PlanError("plan/illegal", "requests", request, "is no live request")
        if self._prefixes is not None and not live.num_cached:
            self._reuse(self._prefixes, live, request, kv_len)
        end = kv_len + query_len
        if live.num_cached != kv_len or end > live.num_known:
            rule = f"request {request} holds {live.num_cached} of {live.num_known} tokens"
            raise PlanError("plan/illegal", "kv_len, query_len", (kv_len, query_len), rule)
        self._num_own += -(-end // BLOCK_TOKENS) - -(-kv_len // BLOCK_TOKENS)
        live.num_cached = end
        if self._prefixes is not None and kv_len < len(live.prefix_keys) * BLOCK_TOKENS:
            whole = live.prefix_keys[kv_len // BLOCK_TOKENS : end // BLOCK_TOKENS]
            live.keyed.append(self._prefixes.add(whole))
            self._num_own -= len(live.keyed[-1])
        if end < live.num_known:
            return 0
        live.num_known += 1
        live.num_left -= 1
        self.token_s[request].append(now_s)
        return 1

    def _reuse(self, prefixes: PrefixCache, live: _Live, request: int, kv_len: int) -> None:
        """Let a request that begins hold the blocks that its plan counts on."""
        most, _ = self._reusable(request)
        if kv_len % BLOCK_TOKENS or kv_len > most:
            rule = f"request {request} can take whole blocks of {most} cached tokens"
            raise PlanError("plan/illegal", "kv_len", kv_len, rule, legal=[most])
        live.keyed.append(live.prefix_keys[: kv_len // BLOCK_TOKENS])
        prefixes.hold(live.keyed[-1])
        live.num_cached = kv_len
        self.reused_tokens.setdefault(request, kv_len)

    def _give_back(self, live: _Live) -> None:
        self._num_own -= -(-live.num_cached // BLOCK_TOKENS)
        live.num_cached = 0
        if self._prefixes is not None and live.keyed:
            keys = np.concatenate(live.keyed)
            self._num_own += len(keys)
            self._prefixes.release(keys)
            live.keyed.clear()


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
