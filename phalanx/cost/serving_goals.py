"""Inverse questions about engines: what load a rate makes, and what load keeps promises.

Both search the concurrency of a closed loop, whose rate and times rise with it; all plans at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from phalanx.cost.serving_plans import ServingPlans
from phalanx.cost.serving_steady import Loads, SteadyState, closed_loop
from phalanx.cost.serving_step import Rates
from phalanx.cost.serving_work import Column

_HALVINGS = 40
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
