"""Prefill first: whole prompts before any decoding, and room for the whole output set aside.

Decides whether the next engine step computes the prompt of the oldest waiting request, alone, or
one token of every running request. The plain engine that chunked prefill is compared with: short
waits for a first token, paid for by everybody who is decoding.

Symbols
    R           max_running       requests that hold cache at the same time
    T           max_step_tokens   tokens computed in one step, R <= T
    b, N        view.facts: block_tokens, num_blocks of the pool
    p_i, m_i    prompt of request i, and the most output tokens that it may have

The head of the queue joins as soon as fewer than R run and its ceil((p_i + m_i) / b) blocks fit
beside those set aside for the others, blocks that it shares with them once; nobody overtakes it.
Its prompt, behind what the engine's prefix cache holds of it, is the next step; one longer than T
takes ceil(p_i / T) steps, with nothing between them. Only when nobody can join does every
running request get a token. What was set aside is given back when the request ends, so nobody is
ever preempted.

Cost: ceil(p_i / T) steps for a prompt, one step per output token after the first; time to first
token is the wait for the prompts before it and its own; between two tokens of a request lie the
prompts of all that join. A decision is O(R).

Source: prefill-prioritising schedules as Sarathi-Serve, arXiv 2403.02310, section 3, describes
them; admission by longest output, Orca, OSDI 2022, section 4.2.

Differences and limits: no two prompts share a step; no priorities, swapping or drafts. Blocks are
counted as if every layer kept every token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx.action import Action, Compute
from phalanx.policies.serve import ENGINE_STEP, BatchPlan, require_room, reusable, within
from phalanx.policy import Event, React, View
from phalanx.registry import Source, register


@dataclass(slots=True)
class Admitted:
    """A request with the blocks set aside for it and the tokens in its cache."""

    id: int
    prompt_len: int
    blocks: int
    adapter: int
    grammar: int
    cached: int = 0


@dataclass(slots=True, kw_only=True)
class PrefillFirstState:
    """Waiting and running requests by age; `step` is the one under way: (request, its tokens)."""

    max_running: int
    max_step_tokens: int
    waiting: deque[Admitted] = field(default_factory=deque)
    running: dict[int, Admitted] = field(default_factory=dict)
    step: list[tuple[Admitted, int]] = field(default_factory=list)
    num_steps: int = 0


@register(
    "serve", "prefill_first", grain="step", source=Source("Sarathi-Serve", "arXiv 2403.02310")
)
@dataclass(frozen=True, kw_only=True)
class PrefillFirst(React):
    """The options, named above; 0 takes the engine's limit."""

    scope = "engine"
    max_running: int = 0
    max_step_tokens: int = 0

    def start(self, view: View) -> PrefillFirstState:
        facts = view.facts
        running = within("max_running", self.max_running, 1, facts["max_running"])
        most = within("max_step_tokens", self.max_step_tokens, running, facts["max_step_tokens"])
        return PrefillFirstState(max_running=running, max_step_tokens=most)

    def on(self, state: PrefillFirstState, events: Sequence[Event], view: View) -> list[Action]:
        for event in events:
            if event.kind == "arrive":
                require_room(event, view)
                state.waiting.append(_admitted(event, view.facts["block_tokens"]))
            elif event.kind == "step":
                assert state.step, "a step ended that was not decided here"
                for each, count in state.step:
                    each.cached += count
                state.step = []
            elif event.kind in ("finish", "cancel"):
                if state.running.pop(event.item, None) is None:
                    state.waiting = deque(w for w in state.waiting if w.id != event.item)
        return [] if state.step else self._next_step(state, view)

    def _next_step(self, state: PrefillFirstState, view: View) -> list[Action]:
        newest = next(reversed(state.running.values()), None)
        if newest is None or newest.cached >= newest.prompt_len:
            newest = _join(state, view)
        if newest is not None:
            count = min(newest.prompt_len - newest.cached, state.max_step_tokens)
            return [_step(state, [(newest, count)])]
        return [_step(state, [(each, 1) for each in state.running.values()])] * bool(state.running)


def _admitted(event: Event, block_tokens: int) -> Admitted:
    prompt_len, most = event.data["prompt_len"], event.data["max_new"]
    blocks = -(-(prompt_len + most) // block_tokens)
    adapter, grammar = (event.data.get(name, -1) for name in ("adapter", "grammar"))
    return Admitted(event.item, prompt_len, blocks, adapter, grammar)


def _join(state: PrefillFirstState, view: View) -> Admitted | None:
    """The head of the queue, if it may run now."""
    if not state.waiting or len(state.running) >= state.max_running:
        return None
    head, size = state.waiting[0], view.facts["block_tokens"]
    cached, held = reusable(head.id, view)
    to_come = sum(each.blocks - -(-each.cached // size) for each in state.running.values())
    if to_come + head.blocks - held > view.facts["free_blocks"]:
        return None
    head.cached = cached
    state.running[head.id] = state.waiting.popleft()
    return head


def _step(state: PrefillFirstState, rows: list[tuple[Admitted, int]]) -> Action:
    state.step, state.num_steps = rows, state.num_steps + 1
    plan = BatchPlan(
        requests=[each.id for each, _ in rows],
        query_len=[count for _, count in rows],
        kv_len=[each.cached for each, _ in rows],
        num_draft=[0] * len(rows),
        adapter=[each.adapter for each, _ in rows],
        grammar=[each.grammar for each, _ in rows],
    )
    label = f"step.{state.num_steps}"
    return Compute(op=ENGINE_STEP, label=label, num_tokens=plan.num_tokens, batch=plan)
