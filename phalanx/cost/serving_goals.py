"""Inverse questions about engines: what load a rate makes, and what load keeps promises.

Both search the concurrency of a closed loop, whose rate and times rise with it; all plans at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from phalanx.cost.serving_plans import ServingPlans
from phalanx.cost.serving_steady import Loads, SteadyState, closed_loop, running_limit
from phalanx.cost.serving_step import Rates
from phalanx.cost.serving_work import Column

_HALVINGS = 40
_PLACES = 256  # of a trace at which its queue is looked at
_MOST = 1e6  # requests in flight beyond which no engine is asked


def at_rate(
    plans: ServingPlans, loads: Loads, rates: Rates, requests_per_s: Column
) -> tuple[SteadyState, Column]:
    """What requests see that arrive at a rate, and whether the engine keeps up with it.

    Little's law: in a steady state as many requests are in flight as arrive during one of them.
    Where an engine cannot keep up, the state is the one at its highest rate and the queue grows.

    Args:
        loads: lengths; its concurrency is not read.
        requests_per_s: of each engine.
    """
    highest = closed_loop(plans, _with(loads, np.full_like(loads.prompt_tokens, _MOST)), rates)
    keeps_up = highest.requests_per_s >= requests_per_s
    target = np.minimum(requests_per_s, highest.requests_per_s * (1.0 - 1e-3))
    concurrency = _largest(
        loads, lambda each: closed_loop(plans, each, rates).requests_per_s <= target
    )
    return closed_loop(plans, _with(loads, concurrency), rates), keeps_up


def trace_at_rate(
    plans: ServingPlans,
    loads: Loads,
    rates: Rates,
    requests_per_s: Column,
    num_requests: Column,
) -> SteadyState:
    """Means over a trace of `num_requests` that arrive at a rate, be it too high for the engine.

    Where it is, at most `loads.concurrency` run (the engine's limit) and request k begins when
    k - concurrency have ended: a fluid queue, whose waits grow to the end of the trace. Tails and
    bursts need the event simulation.
    """
    limit = np.minimum(np.minimum(loads.concurrency, num_requests), running_limit(plans, loads))
    steady, keeps_up = at_rate(plans, loads, rates, requests_per_s)
    full = closed_loop(plans, _with(loads, limit), rates)
    in_flight = steady.requests_per_s * steady.latency_s
    is_steady = keeps_up & (in_flight <= limit)
    place = num_requests[:, None] * (np.arange(_PLACES) + 0.5) / _PLACES
    begins_s = (place - limit[:, None]) / full.requests_per_s[:, None]
    waits_s = np.maximum(begins_s - place / requests_per_s[:, None], 0.0).mean(axis=1)
    ttft_s = np.where(is_steady, steady.ttft_s, full.ttft_s + waits_s)
    lasts_s = num_requests / np.minimum(requests_per_s, full.requests_per_s)
    lasts_s = lasts_s + np.where(is_steady, steady.latency_s, full.latency_s)
    return SteadyState(
        ttft_s=ttft_s,
        tpot_s=np.where(is_steady, steady.tpot_s, full.tpot_s),
        answer_tokens=loads.answer_tokens,
        requests_per_s=num_requests / lasts_s,
        running=np.where(is_steady, in_flight, limit),
    )


def largest_load(
    plans: ServingPlans,
    loads: Loads,
    rates: Rates,
    *,
    ttft_s: Column | float = np.inf,
    tpot_s: Column | float = np.inf,
    latency_s: Column | float = np.inf,
) -> tuple[SteadyState, Column]:
    """The most requests in flight that keep mean times within limits, and whether any do.

    Args:
        loads: lengths; its concurrency is not read.
        ttft_s, tpot_s, latency_s: limits of means; tails need `phalanx simulate`.
    """

    def keeps(each: Loads) -> Column:
        state = closed_loop(plans, each, rates)
        is_soon = (state.ttft_s <= ttft_s) & (state.latency_s <= latency_s)
        return is_soon & (state.tpot_s <= tpot_s)

    alone = _with(loads, np.ones_like(loads.prompt_tokens))
    concurrency = _largest(loads, keeps)
    return closed_loop(plans, _with(loads, concurrency), rates), keeps(alone)


def _largest(loads: Loads, holds: Callable[[Loads], Column]) -> Column:
    """The largest concurrency, at least 1, up to which a condition holds; by halving logarithms."""
    low, high = np.zeros_like(loads.prompt_tokens), np.full_like(loads.prompt_tokens, np.log(_MOST))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        is_below = holds(_with(loads, np.exp(middle)))
        low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
    return np.exp(low)


def _with(loads: Loads, concurrency: Column) -> Loads:
    return replace(loads, concurrency=concurrency)
