"""Engines for prompts alone beside engines for answers alone: is that better on this cluster?"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from phalanx.cost.serving_efficiency import serving_efficiency
from phalanx.cost.serving_plans import ServingPlans
from phalanx.cost.serving_steady import Loads, SteadyState, split_engines

_HALVINGS = 24
_MOST_IN_FLIGHT = 1e5  # of a cluster, or as many as its engines take
_OF_AN_ENGINE = 1024
_MOST_ROWS = 4096  # of the table of splits: of very many engines not every division is tried


@dataclass(frozen=True, kw_only=True)
class SplitEngines:
    """The best split.

    Attributes:
        row: of the table of plans: how both kinds of engines are cut.
        for_prompts, for_answers: engines.
        most_per_s: requests/s that keep the promises in the mean.
        ttft_s, tpot_s: means at that load.
    """

    row: int
    for_prompts: int
    for_answers: int
    most_per_s: float
    ttft_s: float
    tpot_s: float


def best_split(
    plans: ServingPlans,
    replicas: np.ndarray,
    loads: Loads,
    *,
    ttft_s: float = np.inf,
    tpot_s: float = np.inf,
) -> SplitEngines | None:
    """The split of equal engines that serves most requests within promised means.

    Args:
        plans: N ways to cut an engine; replicas: engines of each [N].
        loads: lengths [N]; its concurrency is not read.

    Returns:
        None where no cluster has two engines, or no split keeps the promises even for one request.
    """
    most = max(1, _MOST_ROWS // len(replicas))
    counts = [_counts(int(each) - 1, most) for each in replicas]
    row = np.repeat(np.arange(len(replicas)), [len(each) for each in counts])
    prompts = np.concatenate(counts)
    if not len(row):
        return None
    many, load = plans.take(row), loads.take(row)
    rates = serving_efficiency().rates(many)
    workers = (prompts.astype(float), (replicas[row] - prompts).astype(float))

    def at(concurrency: np.ndarray) -> SteadyState:
        return split_engines(many, many, workers, replace(load, concurrency=concurrency), rates)

    most_in_flight = np.maximum(_MOST_IN_FLIGHT, _OF_AN_ENGINE * replicas[row])
    low, high = np.zeros(len(row)), np.log(most_in_flight)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        state = at(np.exp(middle))
        keeps = (state.ttft_s <= ttft_s) & (state.tpot_s <= tpot_s)
        low, high = np.where(keeps, middle, low), np.where(keeps, high, middle)
    state = at(np.exp(low))
    keeps = (state.ttft_s <= ttft_s) & (state.tpot_s <= tpot_s)
    if not keeps.any():
        return None
    best = int(np.where(keeps, state.requests_per_s, -1.0).argmax())
    return SplitEngines(
        row=int(row[best]),
        for_prompts=int(prompts[best]),
        for_answers=int(replicas[row[best]] - prompts[best]),
        most_per_s=float(state.requests_per_s[best]),
        ttft_s=float(state.ttft_s[best]),
        tpot_s=float(state.tpot_s[best]),
    )


def _counts(last: int, most: int) -> np.ndarray:
    """1 to `last`, or `most` of these at equal distances."""
    if last < 1:
        return np.zeros(0, dtype=int)
    return np.unique(np.linspace(1, last, min(last, most)).round().astype(int))
