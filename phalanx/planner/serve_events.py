"""Requests played against an engine that is not here: the real scheduler on priced steps.

`cost.serving_step` prices a decoding step and a whole prompt; a step of the scheduler holds both,
so it takes the decoding of its answering rows and, for prompts' chunks, the differences of whole
prompts. Prices are tables over rows, context and prompt lengths, filled once: a step of the event
loop looks them up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Protocol

import numpy as np

from phalanx.cost.serving_plans import ServingPlans
from phalanx.cost.serving_steady import Loads, request_s
from phalanx.cost.serving_step import Rates, decode_s, prefill_s
from phalanx.planner.request_trace import RequestTrace
from phalanx.policy import React
from phalanx.registry import build
from phalanx.worlds.sim_serving import BLOCK_TOKENS, SimEngine, SimRequest, play_engine

_CONTEXTS, _PROMPTS = 12, 40  # places of the tables


class Columns(Protocol):
    """What a price depends on: the rows of a step, as `BatchPlan` has them."""

    @property
    def query_len(self) -> Sequence[int]:
        """Tokens computed for each."""
        ...

    @property
    def kv_len(self) -> Sequence[int]:
        """Tokens cached before."""
        ...


class StepPrices:
    """Seconds of an engine's steps, looked up.

    Args:
        plan: one row: the engine.
        rates: of that row.
        most_rows: requests that decode at once, over all attention replicas.
        longest: tokens of the longest prompt with its answer.
    """

    def __init__(self, plan: ServingPlans, rates: Rates, *, most_rows: int, longest: int) -> None:
        replicas = float(plan.attention_dp[0])
        self._replicas = replicas
        self._rows = _steps(max(2.0, most_rows / replicas), 2 * ceil(np.log2(most_rows + 1)) + 2)
        self._contexts = _steps(float(longest), _CONTEXTS)
        rows, contexts = np.meshgrid(self._rows, self._contexts, indexing="ij")
        many = plan.take(np.zeros(rows.size, dtype=int))
        table = decode_s(many, rows.ravel(), contexts.ravel(), _repeated(rates, rows.size))
        self._decode = (table * rates["decode_level"][0]).reshape(rows.shape).tolist()
        self._prompts = _steps(float(longest), _PROMPTS)
        count = len(self._prompts)
        many = plan.take(np.zeros(count, dtype=int))
        whole = prefill_s(many, np.asarray(self._prompts), np.ones(count), _repeated(rates, count))
        at_once = replicas ** min(float(rates["together"][0]), 1.0) * float(plan.pipeline[0])
        self._whole_s = (whole * rates["prefill_level"][0] / at_once).tolist()
        self._stall = float(rates["stall"][0])

    def batch_s(self, batch: Columns) -> float:
        """Seconds of a step of the scheduler."""
        query_len, kv_len = np.asarray(batch.query_len), np.asarray(batch.kv_len)
        decodes = (query_len == 1) & (kv_len > 0)
        decoding, prompts_s = int(np.count_nonzero(decodes)), 0.0
        for at in np.flatnonzero(~decodes).tolist():
            before, after = batch.kv_len[at], batch.kv_len[at] + batch.query_len[at]
            before_s = self.prompt_s(before) if before else self._whole_s[0]
            prompts_s = prompts_s or self._whole_s[0]  # all prompts of a step share its starts
            prompts_s += self.prompt_s(after) - before_s
        if not decoding:
            return prompts_s
        context = float(kv_len[decodes].sum()) / decoding
        return self._decode_s(decoding, context) + self._stall * prompts_s

    def _decode_s(self, decoding: int, context: float) -> float:
        at, share = _place(self._rows, max(1.0, decoding / self._replicas))
        to, part = _place(self._contexts, context)
        low = self._decode[at][to] * (1 - part) + self._decode[at][to + 1] * part
        high = self._decode[at + 1][to] * (1 - part) + self._decode[at + 1][to + 1] * part
        return low * (1 - share) + high * share

    def rest_s(self, tokens: int, cached: int) -> float:
        """Of the engine's time for a prompt whose first tokens are cached but attended to."""
        whole_s = self.prompt_s(tokens)
        return whole_s - self.prompt_s(cached) + self._whole_s[0] if cached else whole_s

    def prompt_s(self, tokens: int) -> float:
        """Of the engine's time for a whole prompt."""
        at, share = _place(self._prompts, tokens)
        return self._whole_s[at] * (1 - share) + self._whole_s[at + 1] * share


def _steps(most: float, count: int) -> list[float]:
    """Rising from 1 to `most`, each the same multiple of the one before."""
    return np.geomspace(1.0, max(most, 2.0), count).tolist()


def _place(points: Sequence[float], value: float) -> tuple[int, float]:
    """The interval that a value lies in, and where in it; beyond the ends the slope goes on."""
    at = min(max(bisect_right(points, value) - 1, 0), len(points) - 2)
    return at, (value - points[at]) / (points[at + 1] - points[at])


def _repeated(rates: Rates, count: int) -> dict[str, np.ndarray]:
    return {name: np.repeat(column[:1], count) for name, column in rates.items()}


@dataclass(frozen=True)
class PlayedRequests:
    """What requests saw, arrays of one length.

    Attributes:
        ttft_s, latency_s: of each request.
        tpot_s: of those with two output tokens or more.
        preempted: caches that were dropped.
        end_s: when the last request ended.
        prompt_tokens, reused_tokens: of each request; of these, found in the prefix cache.
    """

    ttft_s: np.ndarray
    tpot_s: np.ndarray
    latency_s: np.ndarray
    preempted: int
    end_s: float
    prompt_tokens: np.ndarray
    reused_tokens: np.ndarray

    @property
    def reused_frac(self) -> float:
        """Share of all prompts' tokens that the prefix cache held."""
        return float(self.reused_tokens.sum() / self.prompt_tokens.sum())

    def percentiles(self, name: str) -> tuple[float, float]:
        """Median and 99th percentile of "ttft_s", "tpot_s" or "latency_s"."""
        values = getattr(self, name)
        if not len(values):
            return float("nan"), float("nan")
        return float(np.percentile(values, 50)), float(np.percentile(values, 99))


def play_requests(
    plan: ServingPlans,
    rates: Rates,
    requests: RequestTrace,
    *,
    kv_tokens: float,
    max_running: int,
    engines: int = 1,
    scheduler: str | dict[str, Any] = "continuous",
    reuses_prefixes: bool = True,
) -> PlayedRequests:
    """Play requests on equal engines that take turns, each with the real scheduler.

    Each engine has a prefix cache of its own, and its attention replicas count as one: turns send
    a request where it would go without looking at what is cached there.

    Args:
        plan: one row: an engine; rates: its columns.
        kv_tokens: that the caches of one engine hold.
        max_running: requests in a batch of one engine.
        scheduler: policy of the family "serve".
        reuses_prefixes: whether prompts that begin alike share what is cached.

    Raises:
        JobError: `serve/request` for a request that no cache can hold.
    """
    if not reuses_prefixes:
        requests = replace(requests, prefixes=None)
    longest = int((requests.prompt_tokens + requests.output_tokens).max())
    prices = StepPrices(plan, rates, most_rows=max_running, longest=longest)
    policy: React = build("serve", scheduler, "plan.serve")
    step_tokens = int(rates["chunk_tokens"][0] * plan.attention_dp[0])
    each = [
        _play_engine(
            policy, prices, requests.every(engines, first), kv_tokens, max_running, step_tokens
        )
        for first in range(min(engines, len(requests)))
    ]
    mean_prompt = np.atleast_1d(float(requests.prompt_tokens.mean()))
    loads = Loads(prompt_tokens=mean_prompt, answer_tokens=mean_prompt, concurrency=mean_prompt)
    outside_s = float(request_s(loads, rates)[0])
    played = PlayedRequests(
        ttft_s=np.concatenate([one.ttft_s for one in each]) + outside_s,
        tpot_s=np.concatenate([one.tpot_s for one in each]),
        latency_s=np.concatenate([one.latency_s for one in each]) + outside_s,
        preempted=sum(one.preempted for one in each),
        end_s=max(one.end_s for one in each),
        prompt_tokens=np.concatenate([one.prompt_tokens for one in each]),
        reused_tokens=np.concatenate([one.reused_tokens for one in each]),
    )
    if plan.pipeline[0] == 1:
        return played
    # stages work on several prompts at once, but a prompt passes all of them
    rest_s = prices.rest_s(int(mean_prompt[0]), int(played.reused_tokens.mean()))
    passing_s = rest_s * float(plan.pipeline[0] - 1)
    return replace(played, ttft_s=played.ttft_s + passing_s, latency_s=played.latency_s + passing_s)


def _play_engine(
    policy: React,
    prices: StepPrices,
    requests: RequestTrace,
    kv_tokens: float,
    max_running: int,
    step_tokens: int,
) -> PlayedRequests:
    asked = _sim_requests(requests)
    engine = SimEngine(
        asked,
        num_blocks=int(kv_tokens // BLOCK_TOKENS),
        max_running=max_running,
        max_step_tokens=max(step_tokens, max_running),
    )
    play_engine(engine, policy, prices.batch_s)
    first_s = np.asarray([engine.token_s[each.id][0] for each in asked])
    last_s = np.asarray([engine.token_s[each.id][-1] for each in asked])
    gaps = requests.output_tokens - 1
    return PlayedRequests(
        ttft_s=first_s - requests.arrival_s,
        tpot_s=((last_s - first_s) / np.maximum(gaps, 1))[gaps > 0],
        latency_s=last_s - requests.arrival_s,
        preempted=engine.num_preempted,
        end_s=float(last_s.max()),
        prompt_tokens=requests.prompt_tokens,
        reused_tokens=np.asarray([engine.reused_tokens.get(each.id, 0) for each in asked]),
    )


def _sim_requests(requests: RequestTrace) -> list[SimRequest]:
    columns = (requests.arrival_s, requests.prompt_tokens, requests.output_tokens)
    asked = [
        SimRequest(id=at, arrive_s=sent_s, prompt_len=prompt, max_new=output, num_new=output)
        for at, (sent_s, prompt, output) in enumerate(zip(*(each.tolist() for each in columns)))
    ]
    if requests.prefixes is None:
        return asked
    keys = requests.prefixes.block_keys(requests.prompt_tokens, BLOCK_TOKENS)
    return [replace(each, prefix_keys=its) for each, its in zip(asked, keys)]
