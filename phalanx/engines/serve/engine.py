"""The engine: requests, weights, adapters and cache; carries out one batch plan at a time.

Tokens in, tokens out: for reinforcement learning and evaluation in one process see `offline`.

Legend: S rows (tokens) of a step, R rows whose next token is chosen.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.engines.serve.adapters import BASE, AdapterSlots
from phalanx.engines.serve.blocks import BLOCK_TOKENS
from phalanx.engines.serve.kv import PagedKv
from phalanx.engines.serve.kv_room import KvLimits
from phalanx.engines.serve.model import PackedDecoder
from phalanx.engines.serve.sampling import choose, score
from phalanx.engines.serve.settings import Request
from phalanx.engines.serve.sleep import Sleeper
from phalanx.engines.serve.step import BatchPlan, Output, StepResult
from phalanx.errors import JobError, PlanError
from phalanx.models.spec import LoraSpec
from phalanx.ops.placed import placed

_SCORED_ROWS = 64  # prompt rows whose logits exist at once
_INCOMPLETE = "+incomplete"


class ServeEngine:
    """Binds a packed decoder and a paged cache to batch plans.

    Args:
        model: filled weights.
        kv: the cache.
        limits: what both were made for.
        weight_version: name of the weights, reported with every token.
        max_adapters, max_lora_rank: adapters held at once, and the largest rank of one.

    Attributes:
        facts: what a policy's view holds, kept up to date.
        adapters: what is loaded beside the base.
        num_steps, num_prompt_tokens, num_output_tokens, num_preempted: counters.
    """

    def __init__(
        self,
        model: PackedDecoder,
        kv: PagedKv,
        limits: KvLimits,
        weight_version: str,
        *,
        max_adapters: int = 4,
        max_lora_rank: int = 64,
    ) -> None:
        self.model, self.kv, self.limits = model, kv, limits
        self.weight_version = weight_version
        self.adapters = AdapterSlots(
            model.config, max_adapters, max_lora_rank, model.dtype, model.device
        )
        self.requests: dict[int, Request] = {}
        self._slots: dict[int, int] = {}  # request -> slot of its adapter
        self._sleeper = Sleeper(model, kv)
        self.num_steps = self.num_prompt_tokens = self.num_output_tokens = self.num_preempted = 0
        self.facts: dict[str, Any] = {
            "num_blocks": kv.num_blocks,
            "free_blocks": kv.num_free,
            "block_tokens": BLOCK_TOKENS,
            "max_running": limits.max_running,
            "max_step_tokens": limits.max_step_tokens,
        }

    # ---- requests ------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Accept a request; a policy decides when it is computed.

        Raises:
            JobError: `serve/request` for a doubled id, a prompt that is empty, cannot fit or holds
                what is no token; `serve/adapter` for an adapter that is not loaded.
            WorldError: `serve/asleep`.
        """
        self._sleeper.require_awake()
        num_prompt, max_new = len(request.tokens), request.sampling.max_new
        if request.id in self.requests:
            raise JobError("serve/request", "id", request.id, "is the id of a live request")
        if num_prompt < 1 or max_new < 1 or num_prompt + max_new > self.limits.max_tokens:
            rule = f"prompt and output must have 2..{self.limits.max_tokens} tokens together"
            value, legal = f"{num_prompt} + {max_new}", [self.limits.max_tokens]
            raise JobError("serve/request", "tokens", value, rule, legal=legal)
        size = self.model.config.vocab_size
        if not 0 <= min(request.tokens) <= max(request.tokens) < size:
            wrong = next(each for each in request.tokens if not 0 <= each < size)
            rule = "is no token of this model"
            raise JobError("serve/request", "prompt", wrong, rule, legal=[0, size - 1])
        self._slots[request.id] = self.adapters.acquire(request.adapter)
        self.requests[request.id] = request

    def adapter_slot(self, request: int) -> int:
        """The slot that a batch plan must name for a live request; -1 for the base."""
        return self._slots.get(request, BASE)

    def cancel(self, request: int) -> bool:
        """Forget a request between two steps; whether it was live."""
        known = self.requests.pop(request, None) is not None
        self._release(request)
        self.adapters.release(self._slots.pop(request, BASE))
        return known

    def truncate(self, request: int, length: int) -> None:
        """Keep the first `length` tokens of a request; the next one is chosen anew from there.

        For those who make their own plans (drafts that were refused, an answer that is taken back):
        policies of the family "serve" have no event for it.

        Raises:
            JobError: `serve/request` for no live request, a length that cuts the prompt or is
                longer than the request, or when a sliding window needs tokens that are gone.
        """
        live = self.requests.get(request)
        if live is None:
            raise JobError("serve/request", "truncate", request, "is no live request")
        if not live.num_prompt <= length <= len(live.tokens):
            rule = f"must lie in {live.num_prompt}..{len(live.tokens)}: prompt, and all tokens"
            legal = [live.num_prompt, len(live.tokens)]
            raise JobError("serve/request", "truncate", length, rule, legal=legal)
        # the last token is computed again: its row chooses the next one
        if (held := min(self.kv.length(request), length - 1)) > 0:
            self.kv.truncate(request, held)
        else:
            self.kv.release(request)
        del live.tokens[length:]
        self.facts["free_blocks"] = self.kv.num_free

    # ---- weights -------------------------------------------------------------------------------

    def version_of(self, request: int) -> str:
        """Version of the weights that compute a live request, its adapter's included."""
        return self.weight_version + self.adapters.suffix(self.adapter_slot(request))

    def update_weights(
        self, tensors: Iterable[tuple[str, Tensor]], version: str, *, strict: bool = True
    ) -> None:
        """Replace weights of the base in place, between two steps.

        Live requests go on with the cache they have: keys and values of the old weights, tokens of
        the new ones, as the version of every token says. Cancel and add them again where that
        matters. An engine that sleeps without weights has them afterwards.

        Args:
            tensors: (canonical name, whole tensor), for example from a trainer, one at a time.
            strict: demand every tensor of the model (always the case after level 2).

        Raises:
            JobError: `model/tensor`; what came before the wrong tensor has been replaced then, and
                the version ends in "+incomplete" until an update succeeds.
        """
        strict = strict or not self.has_weights
        try:
            self._sleeper.fill_weights(lambda: self.model.update(tensors, strict=strict))
        except BaseException:
            if self.has_weights and not self.is_incomplete:
                self.weight_version += _INCOMPLETE
            raise
        self.weight_version = version

    @property
    def is_incomplete(self) -> bool:
        """Whether an update broke off, so that the weights are of two models."""
        return self.weight_version.endswith(_INCOMPLETE)

    def load_adapter(self, name: str, folder: str | Path, *, version: int | None = None) -> None:
        """As `AdapterSlots.load`; requests may ask for it from now on."""
        self.adapters.load(name, folder, version=version)

    def update_adapter(self, name: str, lora: LoraSpec, tensors: Mapping[str, Tensor]) -> None:
        """As `AdapterSlots.put`: load an adapter, or replace its weights, from tensors at hand."""
        self.adapters.put(name, lora, tensors)

    def unload_adapter(self, name: str) -> None:
        """As `AdapterSlots.unload`; live requests of it go on to their end."""
        self.adapters.unload(name)

    # ---- sleep ---------------------------------------------------------------------------------

    @property
    def sleep_level(self) -> int:
        """0 awake, 1 without a cache, 2 without weights too."""
        return self._sleeper.level

    @property
    def has_weights(self) -> bool:
        """False after level 2, until an update."""
        return self._sleeper.has_weights

    def sleep(self, level: int) -> None:
        """Give the cache's memory back, at level 2 the weights' too, as `Sleeper.fall_asleep`."""
        self._sleeper.fall_asleep(level, len(self.requests))

    def wake(self) -> None:
        """Take the memory again, as `Sleeper.wake`; after level 2 update the weights before."""
        self._sleeper.wake()

    # ---- steps ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, plan: BatchPlan) -> StepResult:
        """Carry out a batch plan.

        Raises:
            PlanError: `plan/illegal` for a plan that does not fit requests, cache or limits.
        """
        start_s = time.perf_counter()
        plan.require_legal(self.limits.max_running, self.limits.max_step_tokens)
        self._require_plain(plan)
        for request in plan.preempted:
            self._release(request)
            self.num_preempted += 1
        # single tokens first, and the rows of an adapter together
        rows = sorted(plan.rows(), key=lambda row: (row[1] > 1, self.adapter_slot(row[0])))
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
        per_row = [accepted[i] for i in plan.requests]
        return StepResult(plan.requests, per_row, outputs, time.perf_counter() - start_s)

    def _require_plain(self, plan: BatchPlan) -> None:
        """Raise `plan/illegal` for drafts, grammars, or another adapter than the request's."""
        for where, column, only in (
            ("num_draft", plan.num_draft, 0),
            ("grammar", plan.grammar, -1),
        ):
            if wrong := [each for each in column if each != only]:
                rule = "is something that this engine does not compute"
                raise PlanError("plan/illegal", where, wrong[0], rule, legal=[only])
        for request, slot in zip(plan.requests, plan.adapter):
            if slot != (own := self.adapter_slot(request)):
                rule = f"request {request} has its adapter in another slot"
                raise PlanError("plan/illegal", "adapter", slot, rule, legal=[own])

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
        tokens_S, positions_S = (
            placed(np.array(each, dtype=np.int64), self.model.device)
            for each in (tokens, positions)
        )
        steps = self.kv.step([each.id for each in live], counts)
        slots = [self.adapter_slot(each.id) for each in live]
        adapters = self.adapters.batch(slots, counts)
        return self.model.forward(tokens_S, positions_S, steps, self.kv.pools, adapters)

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
            version = self.version_of(each.id)
            outputs.append(Output(each.id, token, version, its_score, reason, of_prompt))
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
