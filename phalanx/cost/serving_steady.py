"""An engine under a steady load: time to first token, time between tokens, latency, throughput.

Closed loops (a fixed number of requests in flight), loads that never lack requests, static batches
and open rates all rest on the two prices of `cost.serving_step`: a cycle of C requests costs their
C prompts and the steps of their answers, and concurrency = throughput x latency.

Legend: C requests in flight in an engine, n and m tokens of a prompt and its answer.

Where prompts begin alike, what an engine's prefix cache holds of them is not computed, and what all
of them share is kept once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from phalanx.cost.serving_plans import ServingPlans
from phalanx.cost.serving_step import Rates, decode_s, kv_room_tokens, kv_token_bytes, prefill_s
from phalanx.cost.serving_work import Column

MAX_ROWS = 4096.0  # of one engine's replica, where nothing else limits it
_LEAST_ROOM = 0.05
_ROUNDS = 16  # of finding how many requests are being answered; each halves what is wrong


@dataclass(frozen=True, kw_only=True)
class Loads:
    """What N engines are asked for.

    Attributes:
        prompt_tokens, answer_tokens: n and m, on average.
        concurrency: C, requests in flight in the engine, waiting ones included.
        reused_tokens: of a prompt's first tokens, those that the prefix cache holds, on average.
        shared_tokens: first tokens that all prompts have in common, kept once.
    """

    prompt_tokens: Column
    answer_tokens: Column
    concurrency: Column
    reused_tokens: Column | float = 0.0
    shared_tokens: Column | float = 0.0

    def take(self, rows: np.ndarray) -> Loads:
        """Rows by mask or indices; a number is of all rows."""
        columns = {each.name: np.asarray(getattr(self, each.name)) for each in fields(Loads)}
        return Loads(**{name: each[rows] if each.ndim else each for name, each in columns.items()})


@dataclass(frozen=True, kw_only=True)
class SteadyState:
    """What each request and each engine sees, [N].

    Attributes:
        ttft_s, tpot_s: to the first token, waiting included; between the others, on average.
        answer_tokens: of a request.
        requests_per_s: of an engine.
        running: requests whose cache is on the devices.
    """

    ttft_s: Column
    tpot_s: Column
    answer_tokens: Column
    requests_per_s: Column
    running: Column

    @property
    def latency_s(self) -> Column:
        """From a request's arrival to its last token."""
        return self.ttft_s + (self.answer_tokens - 1.0) * self.tpot_s

    @property
    def output_tokens_per_s(self) -> Column:
        """Of an engine."""
        return self.requests_per_s * self.answer_tokens


def running_limit(plans: ServingPlans, loads: Loads) -> Column:
    """Requests whose caches fit on an engine's devices, at least one.

    Of an engine that is said to run, at least `_LEAST_ROOM` of its memory holds caches, however
    little our estimate of the rest leaves.
    """
    context = loads.prompt_tokens + loads.answer_tokens / 2.0
    room = np.maximum(
        kv_room_tokens(plans, context),
        _LEAST_ROOM * plans.memory / kv_token_bytes(plans, context),
    )
    shared = loads.shared_tokens
    fits = np.maximum(room - shared, 0.0) / (context - shared) * plans.attention_dp
    return np.maximum(np.minimum(fits, MAX_ROWS * plans.attention_dp), 1.0)


def closed_loop(plans: ServingPlans, loads: Loads, rates: Rates) -> SteadyState:
    """A load that keeps `concurrency` requests in flight: who gets an answer asks again.

    Prompts are computed between (or in chunks within) the decoding steps of the others, so each
    lengthens a token by its share of a cycle; requests beyond the cache's room wait.
    """
    running = np.minimum(loads.concurrency, running_limit(plans, loads))
    arriving = 1.0 + running / plans.attention_dp / loads.answer_tokens  # in a step
    prompt_s, share_s = prompt_times(plans, loads, rates, arriving)
    step_s = decode_time(plans, loads, running, rates)
    others = np.maximum(running - 1.0, 0.0)
    steps = np.maximum(loads.answer_tokens - 1.0, 1.0)
    tpot_s = step_s + rates["stall"] * others * share_s / loads.answer_tokens
    busy = running * share_s / (running * share_s + steps * step_s)
    met = np.minimum(rates["burst"] + rates["queue"] * busy**2, 1.0) * others * share_s / 2.0
    first_s = request_s(loads, rates) + prompt_s + 0.5 * step_s + met
    cycle_s = first_s + steps * tpot_s
    waits_s = cycle_s * (loads.concurrency / running - 1.0)
    ttft_s = first_s + waits_s + rates["warm_s"] / loads.concurrency
    return _steady(loads, ttft_s, tpot_s, running)


def saturated(plans: ServingPlans, loads: Loads, rates: Rates) -> SteadyState:
    """A load that never lacks requests: as many run as the caches hold."""
    concurrency = np.minimum(loads.concurrency, running_limit(plans, loads))
    return closed_loop(plans, replace(loads, concurrency=concurrency), rates)


def static_batch(plans: ServingPlans, loads: Loads, rates: Rates) -> SteadyState:
    """`concurrency` prompts computed together, then decoded together until all are done."""
    rows = loads.concurrency / plans.attention_dp
    each_s = prefill_s(plans, loads.prompt_tokens, rows, rates, loads.reused_tokens)
    prompt_s = each_s * rates["prefill_level"]
    ttft_s = prompt_s + request_s(loads, rates)
    tpot_s = decode_time(plans, loads, loads.concurrency, rates)
    return _steady(loads, ttft_s, tpot_s, loads.concurrency)


def _steady(loads: Loads, ttft_s: Column, tpot_s: Column, running: Column) -> SteadyState:
    """With the rate that keeps so many requests in flight (Little's law)."""
    latency_s = ttft_s + (loads.answer_tokens - 1.0) * tpot_s
    return SteadyState(
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        answer_tokens=loads.answer_tokens,
        requests_per_s=loads.concurrency / latency_s,
        running=running,
    )


def prompt_times(
    plans: ServingPlans, loads: Loads, rates: Rates, batch: Column
) -> tuple[Column, Column]:
    """Seconds until a lone prompt is computed, and what each of `batch` takes of the engine's time.

    What the prefix cache holds of them is not computed. Prompts in one chunk share its starts;
    attention replicas that compute prompts at the same time share the experts' work; pipeline
    stages work on several prompts at once.
    """
    tokens, cached = loads.prompt_tokens, loads.reused_tokens
    one = np.ones_like(tokens)
    batch = np.clip(batch, 1.0, np.maximum(rates["chunk_tokens"] / (tokens - cached), 1.0))
    prompt_s = prefill_s(plans, tokens, one, rates, cached) * rates["prefill_level"]
    batch_s = prefill_s(plans, tokens, batch, rates, cached) * rates["prefill_level"]
    at_once = plans.attention_dp ** np.minimum(rates["together"], 1.0)
    return prompt_s, batch_s / batch / at_once / plans.pipeline


def decode_time(plans: ServingPlans, loads: Loads, running: Column, rates: Rates) -> Column:
    """Seconds of a token when `running` requests of an engine decode."""
    context = loads.prompt_tokens + loads.answer_tokens / 2.0
    rows = np.maximum(running / plans.attention_dp, 1.0)
    return decode_s(plans, rows, context, rates) * rates["decode_level"]


def request_s(loads: Loads, rates: Rates) -> Column:
    """Of a request outside the engine's steps: parsing, splitting into tokens, the network."""
    return rates["request_s"] + loads.prompt_tokens * rates["request_token_s"]


def split_engines(
    prompt_plans: ServingPlans,
    plans: ServingPlans,
    workers: tuple[Column, Column],
    loads: Loads,
    rates: Rates,
) -> SteadyState:
    """Engines for prompts alone that hand their caches to engines for answers alone.

    Args:
        prompt_plans, plans: of each engine of both kinds.
        workers: engines of both kinds; each answer engine has its share of the requests.
        loads: of the whole deployment.

    The slower of both kinds sets the pace: requests queue for prompts until no more of them are
    being answered than prompts are computed.
    """
    prompt_s, share_s = prompt_times(prompt_plans, loads, rates, np.full_like(workers[0], np.inf))
    steps = np.maximum(loads.answer_tokens - 1.0, 1.0)
    moved = loads.prompt_tokens - loads.shared_tokens
    move_s = moved * kv_token_bytes(plans, loads.prompt_tokens) / plans.network
    alone_s = request_s(loads, rates) + prompt_s + move_s + rates["hand_s"]
    limit = running_limit(plans, loads) * workers[1]
    answering = np.minimum(loads.concurrency, limit)
    for _ in range(_ROUNDS):
        tpot_s = decode_time(plans, loads, answering / workers[1], rates)
        others = np.maximum(loads.concurrency / workers[0] - 1.0, 0.0)
        pace = loads.concurrency / (alone_s + steps * tpot_s)
        busy = np.minimum(pace * share_s / workers[0], 1.0)
        met = np.minimum(rates["burst"] + rates["queue"] * busy**2, 1.0) * others * share_s / 2.0
        ttft_s = alone_s + 0.5 * tpot_s + met
        pace = np.minimum(loads.concurrency / (ttft_s + steps * tpot_s), workers[0] / share_s)
        pace = np.minimum(pace, limit / (steps * tpot_s))
        answering = 0.5 * answering + 0.5 * np.minimum(pace * steps * tpot_s, limit)
    ttft_s = loads.concurrency / pace - steps * tpot_s + rates["warm_s"] / loads.concurrency
    return _steady(loads, ttft_s, tpot_s, answering)
