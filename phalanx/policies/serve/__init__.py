"""Which tokens of which requests an engine computes in its next step.

What an engine tells a policy of this family
- event "arrive": `item` is the request; data: prompt_len, max_new (tokens), adapter and grammar
  (slots, -1 or absent: none). The engine has refused what can never fit.
- event "step": the step under way ended; data: `requests` and `accepted` (in the order of the
  plan's rows; accepted counts the new output tokens, 0 while a prompt is not whole).
- event "finish" or "cancel": the request is over, its blocks are free already.
- view.facts: num_blocks, free_blocks (of the pool that grows with every token), block_tokens,
  max_running, max_step_tokens (what the engine can hold); where the engine keeps blocks of
  prompts for others, `reuse`: waiting request -> (its first tokens that are in the cache, how many
  of their blocks running requests hold). A plan takes them by beginning at such a `kv_len`.

What a policy answers: at most one `Compute(op="engine.step", batch=BatchPlan)`, and none while a
step is under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from phalanx.errors import JobError, PlanError
from phalanx.policy import Event, View

ENGINE_STEP = "engine.step"


class BatchPlan(NamedTuple):
    """One engine step as columns with a row per request.

    Columns are plain integers, so a plan travels to followers as JSON: `BatchPlan(*received)`.

    Attributes:
        requests: ids, each once.
        query_len: tokens computed for it, >= 1.
        kv_len: tokens that its cache holds before the step.
        num_draft: how many of the query tokens are guesses to be verified.
        adapter, grammar: slots, -1 for none.
        preempted: requests that lose their cache before the step and are computed anew later.
    """

    requests: Sequence[int]
    query_len: Sequence[int]
    kv_len: Sequence[int]
    num_draft: Sequence[int]
    adapter: Sequence[int]
    grammar: Sequence[int]
    preempted: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(self.query_len)

    def rows(self) -> list[tuple[int, int, int]]:
        """(request, query_len, kv_len) per row: what decision logs are compared by."""
        return list(zip(self.requests, self.query_len, self.kv_len))

    def require_legal(self, max_running: int, max_step_tokens: int) -> None:
        """Raise `plan/illegal` for a plan that no engine of these limits can carry out."""
        num_rows = len(self.requests)
        if len(set(self.requests)) < num_rows:
            raise PlanError("plan/illegal", "requests", self.requests, "a request stands twice")
        if num_rows and min(self.query_len) < 1:
            where, rule = "query_len", "every row computes at least one token"
            raise PlanError("plan/illegal", where, min(self.query_len), rule, legal=[1])
        for where, value, limit in (
            ("rows", num_rows, max_running),
            ("tokens", self.num_tokens, max_step_tokens),
        ):
            if value > limit:
                rule = "more than the engine can hold"
                raise PlanError("plan/illegal", f"step: {where}", value, rule, legal=[limit])


def within(name: str, option: int, low: int, high: int) -> int:
    """An option that must lie in low..high; 0 takes `high`.

    Raises:
        PlanError: `plan/illegal` for anything else.
    """
    if option != 0 and not low <= option <= high:
        where, rule = f"policy.serve.{name}", f"must lie in {low}..{high}, or be 0 for {high}"
        raise PlanError("plan/illegal", where, option, rule, legal=[min(max(option, low), high)])
    return option or high


def reusable(request: int, view: View) -> tuple[int, int]:
    """What a waiting request can take from the engine's prefix cache; (0, 0) where it has none.

    Returns:
        Tokens, of whole blocks and fewer than the request has; their blocks that are held already.
    """
    reuse = view.facts.get("reuse")
    return reuse(request) if reuse is not None else (0, 0)


def require_room(event: Event, view: View) -> None:
    """Raise `serve/request` for an arrival that could never end: it would block the queue."""
    room = view.facts["num_blocks"] * view.facts["block_tokens"]
    if (most := event.data["prompt_len"] + event.data["max_new"]) > room:
        rule = f"prompt and output do not fit into a cache of {room} tokens"
        raise JobError("serve/request", f"request {event.item}", most, rule, legal=[room])
