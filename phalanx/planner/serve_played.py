"""Requests played against the engines of an answer: percentiles, and the rate that keeps time.

Equal engines of one kind of device are asked the same in whatever cluster they stand: what was
played is remembered, and a larger cluster of them costs no more than a smaller one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, fields, replace

import numpy as np

from phalanx.cost.serving_efficiency import serving_efficiency
from phalanx.cost.serving_plans import ServingPlans
from phalanx.planner.request_trace import RequestTrace, poisson
from phalanx.planner.serve_answers import Engines, ServeAnswer, ServeQuestion
from phalanx.planner.serve_events import PlayedRequests, play_requests

_PROBES = 4  # of the search for a rate whose 99th percentiles hold
_LEAST_PLAYED, _MOST_PLAYED = 300, 1000  # drawn requests
_PER_IN_FLIGHT = 3  # drawn requests for each that is in flight: a steady state is reached
_REMEMBERED = 64  # plays


def with_requests_played(
    answer: ServeAnswer, row: ServingPlans, question: ServeQuestion
) -> ServeAnswer:
    """With percentiles of the trace, or of Poisson arrivals."""
    best = answer.best
    assert best is not None
    kept = _highest(row, best, question) if question.promises else None
    asked = question.asked_per_s
    rate_per_s = asked or (best.loaded if kept is None else kept)
    if question.requests is not None:
        played = _play_trace(row, best, question.requests, question.reuses_prefixes)
    else:
        played = _play_drawn(row, best, question, max(rate_per_s, 1e-3))
    in_time = _keeps(played, question) and rate_per_s > 0
    return replace(
        answer,
        played=played,
        played_per_s=rate_per_s,
        kept_per_s=kept,
        in_time=in_time,
    )


def _play_trace(
    row: ServingPlans, best: Engines, requests: RequestTrace, reuses_prefixes: bool
) -> PlayedRequests:
    """Over all engines."""
    return play_requests(
        row,
        serving_efficiency().rates(row),
        requests,
        kv_tokens=best.kv_tokens,
        max_running=best.max_running,
        engines=best.replicas,
        reuses_prefixes=reuses_prefixes,
    )


@dataclass(frozen=True)
class _Drawn:
    """Poisson arrivals at one engine, and all that their times depend on.

    Attributes:
        engine: values of every column of the engine's row.
    """

    engine: tuple[str, ...]
    kv_tokens: float
    max_running: int
    each_per_s: float
    count: int
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int


_played: OrderedDict[_Drawn, PlayedRequests] = OrderedDict()


def _play_drawn(
    row: ServingPlans, best: Engines, question: ServeQuestion, rate_per_s: float
) -> PlayedRequests:
    """Enough requests for one engine's 99th percentile; others are alike.

    Prompts have in common what formulas take as found in the prefix cache, of a trace too.
    """
    each_per_s = rate_per_s / best.replicas
    steady = _PER_IN_FLIGHT * each_per_s * best.latency_s.value
    drawn = _Drawn(
        engine=_values(row),
        kv_tokens=best.kv_tokens,
        max_running=best.max_running,
        each_per_s=each_per_s,
        count=round(min(max(steady, _LEAST_PLAYED), _MOST_PLAYED)),
        prompt_tokens=round(question.prompt_tokens),
        output_tokens=max(1, round(question.output_tokens)),
        shared_tokens=round(question.reused_tokens),
    )
    if drawn not in _played:
        while len(_played) >= _REMEMBERED:
            _played.popitem(last=False)
        lengths = (drawn.prompt_tokens, drawn.output_tokens)
        _played[drawn] = play_requests(
            row,
            serving_efficiency().rates(row),
            poisson(each_per_s, drawn.count, *lengths, shared_tokens=drawn.shared_tokens),
            kv_tokens=best.kv_tokens,
            max_running=best.max_running,
        )
    return _played[drawn]


def _values(table: object) -> tuple[str, ...]:
    """Of a dataclass of arrays, and of those inside it."""
    found: list[str] = []
    for each in fields(table):  # type: ignore[arg-type]
        value = getattr(table, each.name)
        if isinstance(value, np.ndarray):
            found.append(repr(value.tolist()))
        else:
            found.extend(_values(value))
    return tuple(found)


def _keeps(played: PlayedRequests, question: ServeQuestion) -> bool:
    late = played.percentiles("ttft_s")[1] > question.ttft_s
    slow = played.tpot_s.size and played.percentiles("tpot_s")[1] > question.tpot_s
    return not late and not slow


def _highest(row: ServingPlans, best: Engines, question: ServeQuestion) -> float:
    """The highest rate whose 99th percentiles keep the promises, by halving; 0: none does."""
    low, high = 0.0, best.knee_per_s
    for _ in range(_PROBES):
        middle = (low + high) / 2
        if _keeps(_play_drawn(row, best, question, middle), question):
            low = middle
        else:
            high = middle
    return low
