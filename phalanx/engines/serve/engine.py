"""The engine: requests, weights and cache; carries out one batch plan at a time.

Legend: S rows (tokens) of a step, R rows whose next token is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from phalanx.engines.serve.blocks import BLOCK_TOKENS
from phalanx.engines.serve.kv import KvLimits, PagedKv
from phalanx.engines.serve.model import PackedDecoder
from phalanx.engines.serve.sampling import choose, score
from phalanx.engines.serve.settings import Request, TokenScore
from phalanx.errors import JobError, PlanError

_SCORED_ROWS = 64  # prompt rows whose logits exist at once


class BatchPlan(Protocol):
    """What the engine reads of a plan; the policies of family "serve" make them."""

    requests: Sequence[int]
    preempted: Sequence[int]

    def rows(self) -> list[tuple[int, int, int]]:
        """(request, query_len, kv_len) per row."""
        ...

    def require_legal(self, max_running: int, max_step_tokens: int) -> None:
        """Raise `plan/illegal` unless an engine of these limits can carry it out."""
        ...


@dataclass(frozen=True, slots=True)
class Output:
    """What a step gave one request.

    Attributes:
        token: the new output token.
        score: its probabilities, where asked for.
        reason: "stop" or "length" when it was the last, else "".
        prompt_scores: of the prompt's tokens from the second on, with the first output token.
    """

    request: int
    token: int
    score: TokenScore | None = None
    reason: str = ""
    prompt_scores: list[TokenScore] | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave: accepted output tokens per row of the plan, and the tokens."""

    requests: Sequence[int]
    accepted: Sequence[int]
    outputs: list[Output] = field(default_factory=list)


class ServeEngine:
    """Binds a packed decoder and a paged cache to batch plans.

    Args:
        model: filled weights.
        kv: the cache.
        limits: what both were made for.
        weight_version: name of the weights, reported with every token.

    Attributes:
        facts: what a policy's view holds, kept up to date.
        num_steps, num_prompt_tokens, num_output_tokens, num_preempted: counters.
    """

    def __init__(
        self, model: PackedDecoder, kv: PagedKv, limits: KvLimits, weight_version: str
    ) -> None:
        self.model, self.kv, self.limits = model, kv, limits
        self.weight_version = weight_version
        self.requests: dict[int, Request] = {}
        self.num_steps = self.num_prompt_tokens = self.num_output_tokens = self.num_preempted = 0
        self.facts: dict[str, Any] = {
            "num_blocks": kv.num_blocks,
            "free_blocks": kv.num_free,
            "block_tokens": BLOCK_TOKENS,
            "max_running": limits.max_running,
            "max_step_tokens": limits.max_step_tokens,
        }

    def add(self, request: Request) -> None:
        """Accept a request; a policy decides when it is computed.

        Raises:
            JobError: `serve/request` for a doubled id, an empty prompt or one that cannot fit.
        """
        most = len(request.tokens) + request.sampling.max_new
        if request.id in self.requests:
            raise JobError("serve/request", "id", request.id, "is the id of a live request")
        if not request.tokens or request.sampling.max_new < 1 or most > self.limits.max_tokens:
            rule = f"prompt and output must have 2..{self.limits.max_tokens} tokens together"
            raise JobError("serve/request", "tokens", most, rule, legal=[self.limits.max_tokens])
        self.requests[request.id] = request

    def cancel(self, request: int) -> bool:
        """Forget a request between two steps; whether it was live."""
        known = self.requests.pop(request, None) is not None
        self._release(request)
        return known

    def update_weights(
        self, tensors: Iterable[tuple[str, Tensor]], version: str, *, strict: bool = True
    ) -> None:
        """Replace weights in place, between two steps. Requests go on with the cache they have."""
        self.model.update(tensors, strict=strict)
        self.weight_version = version

    @torch.inference_mode()
    def step(self, plan: BatchPlan) -> StepResult:
        """Carry out a batch plan.

        Raises:
            PlanError: `plan/illegal` for a plan that does not fit requests, cache or limits.
        """
        plan.require_legal(self.limits.max_running, self.limits.max_step_tokens)
        for request in plan.preempted:
            self._release(request)
            self.num_preempted += 1
        rows = sorted(plan.rows(), key=lambda row: row[1] > 1)  # single tokens first
        live = [self._require_row(*row) for row in rows]
        counts = [count for _, count, _ in rows]
        ids = [each.id for each in live]
        self.kv.extend(ids, counts)
        hidden_SD = self._forward(live, counts)
        ends = np.cumsum(counts)
        whole = [i for i, each in enumerate(live) if self.kv.length(each.id) == len(each.tokens)]
        self._score_prompts(live, counts, ends, hidden_SD)
        self._count_prompt_tokens(live, counts)
        last = torch.tensor([ends[i] - 1 for i in whole], dtype=torch.int64)
        outputs = self._choose([live[i] for i in whole], hidden_SD[last.to(hidden_SD.device)])
        self.num_steps += 1
        self.num_output_tokens += len(outputs)
        self.facts["free_blocks"] = self.kv.num_free
        accepted = dict.fromkeys(ids, 0) | dict.fromkeys((each.request for each in outputs), 1)
        return StepResult(plan.requests, [accepted[i] for i in plan.requests], outputs)

    def _require_row(self, request: int, count: int, kv_len: int) -> Request:
        live = self.requests.get(request)
        if live is None:
            raise PlanError("plan/illegal", "requests", request, "is no live request")
        held = self.kv.length(request)
        if held != kv_len or kv_len + count > len(live.tokens):
            rule = f"request {request} holds {held} of {len(live.tokens)} tokens"
            raise PlanError("plan/illegal", "kv_len, query_len", (kv_len, count), rule)
        return live

    def _forward(self, live: Sequence[Request], counts: Sequence[int]) -> Tensor:
        tokens: list[int] = []
        positions: list[int] = []
        for each, count in zip(live, counts):
            end = self.kv.length(each.id)
            tokens += each.tokens[end - count : end]
            positions += range(end - count, end)
        tokens_S = torch.tensor(tokens).to(self.model.device, non_blocking=True)
        positions_S = torch.tensor(positions).to(self.model.device, non_blocking=True)
        steps = self.kv.step([each.id for each in live], counts)
        return self.model.forward(tokens_S, positions_S, steps, self.kv.pools)

    def _choose(self, ready: Sequence[Request], hidden_RD: Tensor) -> list[Output]:
        if not ready:
            return []
        outputs = []
        chosen = choose(self.model, hidden_RD, ready)
        for each, (token, its_score) in zip(ready, chosen):
            each.tokens.append(token)
            reason = self._reason(each, token)
            is_first = each.sampling.prompt_logprobs is not None and each.num_new == 1
            of_prompt = each.prompt_scores if is_first else None
            outputs.append(Output(each.id, token, its_score, reason, of_prompt))
            if reason:
                self.cancel(each.id)
        return outputs

    def _reason(self, request: Request, token: int) -> str:
        sampling = request.sampling
        if token in sampling.stop_tokens:
            return "stop"
        if token in self.model.config.eos_tokens and not sampling.ignore_eos:
            return "stop"
        return "length" if request.num_new >= sampling.max_new else ""

    def _score_prompts(
        self, live: Sequence[Request], counts: Sequence[int], ends: np.ndarray, hidden_SD: Tensor
    ) -> None:
        """Row i of a prompt scores its token i + 1, once: not again after a preemption."""
        for each, count, end in zip(live, counts, ends.tolist()):
            if each.sampling.prompt_logprobs is None:
                continue
            length = self.kv.length(each.id)
            first = max(length - count, len(each.prompt_scores))
            last = min(length, each.num_prompt - 1)
            for start in range(first, last, _SCORED_ROWS):
                stop = min(start + _SCORED_ROWS, last)
                rows = slice(end - length + start, end - length + stop)
                logits_RV = self.model.logits(hidden_SD[rows])
                num_best = each.sampling.prompt_logprobs or 0
                each.prompt_scores += score(logits_RV, each.tokens[start + 1 : stop + 1], num_best)

    def _count_prompt_tokens(self, live: Sequence[Request], counts: Sequence[int]) -> None:
        for each, count in zip(live, counts):
            end = self.kv.length(each.id)
            of_prompt = min(end, each.num_prompt) - min(end - count, each.num_prompt)
            self.num_prompt_tokens += of_prompt

    def _release(self, request: int) -> None:
        self.kv.release(request)
        self.facts["free_blocks"] = self.kv.num_free
