"""Requests played against the engines of an answer: percentiles, and the rate that keeps time."""

from __future__ import annotations

from dataclasses import replace

from phalanx.cost.serving_efficiency import serving_efficiency
from phalanx.cost.serving_plans import ServingPlans
from phalanx.planner.request_trace import RequestTrace, poisson
from phalanx.planner.serve_answers import Engines, ServeAnswer, ServeQuestion
from phalanx.planner.serve_events import PlayedRequests, play_requests

_PROBES = 4  # of the search for a rate whose 99th percentiles hold
_LEAST_PLAYED, _MOST_PLAYED = 300, 1000  # drawn requests
_PER_IN_FLIGHT = 3  # drawn requests for each that is in flight: a steady state is reached


def with_requests_played(
    answer: ServeAnswer, row: ServingPlans, question: ServeQuestion
) -> ServeAnswer:
    """With percentiles of the trace, or of Poisson arrivals."""
    best = answer.best
    assert best is not None
    kept = _highest(row, best, question) if question.promises else None
    asked = question.asked_per_s
    rate_per_s = asked or (best.loaded if kept is None else kept)
    requests = question.requests or _arrivals(best, question, max(rate_per_s, 1e-3))
    played = _play(row, best, requests)
    in_time = _keeps(played, question) and rate_per_s > 0
    return replace(
        answer,
        played=played,
        played_per_s=rate_per_s,
        kept_per_s=kept,
        in_time=in_time,
    )


def _arrivals(best: Engines, question: ServeQuestion, rate_per_s: float) -> RequestTrace:
    """Enough requests for one engine's 99th percentile; others are alike."""
    prompt, output = round(question.prompt_tokens), max(1, round(question.output_tokens))
    each_per_s = rate_per_s / best.replicas
    steady = _PER_IN_FLIGHT * each_per_s * best.latency_s.value
    count = round(min(max(steady, _LEAST_PLAYED), _MOST_PLAYED))
    return poisson(each_per_s, count, prompt, output)


def _play(row: ServingPlans, best: Engines, requests: RequestTrace) -> PlayedRequests:
    """A trace over all engines; drawn arrivals are those of one."""
    is_drawn = requests.source.endswith("Poisson arrivals")
    return play_requests(
        row,
        serving_efficiency().rates(row),
        requests,
        kv_tokens=best.kv_tokens,
        max_running=best.max_running,
        engines=1 if is_drawn else best.replicas,
    )


def _keeps(played: PlayedRequests, question: ServeQuestion) -> bool:
    late = played.percentiles("ttft_s")[1] > question.ttft_s
    slow = played.tpot_s.size and played.percentiles("tpot_s")[1] > question.tpot_s
    return not late and not slow


def _highest(row: ServingPlans, best: Engines, question: ServeQuestion) -> float:
    """The highest rate whose 99th percentiles keep the promises, by halving; 0: none does."""
    low, high = 0.0, best.knee_per_s
    for _ in range(_PROBES):
        middle = (low + high) / 2
        if _keeps(_play(row, best, _arrivals(best, question, middle)), question):
            low = middle
        else:
            high = middle
    return low
