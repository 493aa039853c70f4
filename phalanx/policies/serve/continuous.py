"""Continuous batching: requests join and leave at every step, prompts are computed in chunks.

Decides how many tokens of which requests the next engine step computes, which waiting requests
join, and which running one gives its cache back when the blocks run out. First come, first served:
blocks go to the oldest request first, the youngest is preempted, nobody overtakes the queue's head.

Symbols
    R           max_running       requests in one batch
    T           max_step_tokens   tokens computed in one step, R <= T
    C           chunk             prompt tokens of one request in one step
    b, N        view.facts: block_tokens, num_blocks of the pool
    k_i, n_i    tokens of request i in the cache, and known (prompt and output so far)
    s_i         blocks that request i took from the engine's prefix cache when it joined

A request that lacks one token (decoding) gets it; what is left of T goes to prompts by age,
min(n_i - k_i, C) each. The longest run of oldest requests whose blocks, ceil((k_i + q_i) / b) - s_i
each, fit into what is free or their own is kept; the others lose their cache and are computed anew,
output included. When nobody was preempted, the head of the queue joins while the known tokens of
all that run, and their next one, fit: without sharing, sum(floor(n_i / b) + 1) <= N. It starts
behind the tokens that the prefix cache holds, and its blocks that others hold cost no room.

Cost: ceil(prompt / min(C, T)) + outputs - 1 steps of a lone request; k_i tokens computed twice by a
preemption; between two tokens at most one step of T tokens; a decision is O(R), vectorised.

Source: iterations, Orca, OSDI 2022, section 4.1; blocks and recomputation, PagedAttention, arXiv
2309.06180, sections 4.3 and 4.5; chunked prompts, Sarathi-Serve, arXiv 2403.02310, algorithm 3.

Differences and limits: no priorities, swapping or drafts; blocks are counted and block tables never
touched. Admission reserves one output token, not all, so preemption happens; the oldest request is
never preempted, so every request ends. Sliding layers count like full ones. Two requests that join
in one step do not share what only that step computes (vLLM's do), and blocks that a request took
from the prefix cache count as not given back when it is preempted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from phalanx.action import Action, Compute
from phalanx.policies.serve import ENGINE_STEP, BatchPlan, require_room, reusable, within
from phalanx.policy import Event, React, View
from phalanx.registry import Source, register

ID, KNOWN, ADAPTER, GRAMMAR, CACHED, TAKEN = range(6)


@dataclass(slots=True, kw_only=True)
class ContinuousState:
    """Waiting requests are (id, known, adapter, grammar), running ones columns, both by age."""

    max_running: int
    max_step_tokens: int
    chunk: int
    waiting: deque[tuple[int, ...]] = field(default_factory=deque)
    running: np.ndarray = field(default_factory=lambda: np.empty((6, 0), dtype=np.int64))
    gone: set[int] = field(default_factory=set)
    query: np.ndarray | None = None  # tokens per column in the step under way
    num_steps: int = 0


@register("serve", "continuous", grain="step", source=Source("PagedAttention", "arXiv 2309.06180"))
@dataclass(frozen=True, kw_only=True)
class Continuous(React):
    """The options, named above; 0 takes the engine's limit (chunk: max_step_tokens)."""

    scope = "engine"
    max_running: int = 0
    max_step_tokens: int = 0
    chunk: int = 0

    def start(self, view: View) -> ContinuousState:
        facts = view.facts
        running = within("max_running", self.max_running, 1, facts["max_running"])
        most = within("max_step_tokens", self.max_step_tokens, running, facts["max_step_tokens"])
        chunk = within("chunk", self.chunk, 1, most)
        return ContinuousState(max_running=running, max_step_tokens=most, chunk=chunk)

    def on(self, state: ContinuousState, events: Sequence[Event], view: View) -> list[Action]:
        for event in events:
            if event.kind == "arrive":
                require_room(event, view)
                slots = (event.data.get(name, -1) for name in ("adapter", "grammar"))
                state.waiting.append((event.item, event.data["prompt_len"], *slots))
            elif event.kind == "step":
                assert state.query is not None, "a step ended that was not decided here"
                state.running[CACHED] += state.query
                state.running[KNOWN][state.query > 0] += event.data["accepted"]
                state.query = None
            elif event.kind in ("finish", "cancel"):
                state.gone.add(event.item)
        return [] if state.query is not None else self._next_step(state, view)

    def _next_step(self, state: ContinuousState, view: View) -> list[Action]:
        if state.gone:
            ids = state.running[ID].tolist()
            state.running = state.running[:, [each not in state.gone for each in ids]]
            state.gone.difference_update(ids)
        size, running, query = view.facts["block_tokens"], state.running, self._queries(state)
        own = -(-running[CACHED] // size) - running[TAKEN]
        needed = -(-(running[CACHED] + query) // size) - running[TAKEN]
        room = int(view.facts["free_blocks"] + own.sum())
        kept = max(1, int(np.searchsorted(np.cumsum(needed), room, side="right")))
        preempted = running[:CACHED, kept:]
        state.waiting.extendleft(map(tuple, preempted.T[::-1].tolist()))
        state.running, query = running[:, :kept], query[:kept]
        if not preempted.size:
            query = self._admit(state, query, room, view)
        return [self._step(state, query, preempted[ID])] if query.any() else []

    def _queries(self, state: ContinuousState) -> np.ndarray:
        want = np.minimum(state.running[KNOWN] - state.running[CACHED], state.chunk)
        decodes = want == 1
        if decodes.all():
            return want
        prompt = np.where(decodes, 0, want)
        left = state.max_step_tokens - np.count_nonzero(decodes)
        return np.where(decodes, 1, np.clip(left - (np.cumsum(prompt) - prompt), 0, prompt))

    def _admit(
        self, state: ContinuousState, query: np.ndarray, room: int, view: View
    ) -> np.ndarray:
        if not state.waiting:
            return query
        size, left = view.facts["block_tokens"], state.max_step_tokens - int(query.sum())
        room -= int((state.running[KNOWN] // size + 1 - state.running[TAKEN]).sum())
        joined: list[tuple[int, ...]] = []
        queries: list[int] = []
        while state.waiting and left > 0 and len(query) + len(joined) < state.max_running:
            known = state.waiting[0][KNOWN]
            if state.waiting[0][ID] in state.gone:
                state.gone.discard(state.waiting.popleft()[ID])
                continue
            cached, held = reusable(state.waiting[0][ID], view)
            if (room := room - (known // size + 1 - held)) < 0:
                break
            joined.append((*state.waiting.popleft(), cached, cached // size))
            queries.append(min(known - cached, state.chunk, left))
            left -= queries[-1]
        if joined:
            state.running = np.hstack([state.running, np.array(joined, dtype=np.int64).T])
        return np.concatenate([query, np.array(queries, dtype=np.int64)])

    def _step(self, state: ContinuousState, query: np.ndarray, preempted: np.ndarray) -> Action:
        state.query, state.num_steps = query, state.num_steps + 1
        rows = query > 0
        request, _, adapter, grammar, cached, _ = state.running[:, rows].tolist()
        plan = BatchPlan(
            requests=request,
            query_len=query[rows].tolist(),
            kv_len=cached,
            num_draft=[0] * len(request),
            adapter=adapter,
            grammar=grammar,
            preempted=preempted.tolist(),
        )
        label = f"step.{state.num_steps}"
        return Compute(op=ENGINE_STEP, label=label, num_tokens=plan.num_tokens, batch=plan)
