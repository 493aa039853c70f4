"""What a cluster can serve of a model: the best engines for it, what they promise, what they cost.

Times of a steady load are formulas with fitted shares (`cost.serving_steady`) and carry the bars of
their cross-validation; percentiles come from requests played against the real scheduler
(`serve_events`). No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phalanx.cost.bars import Bar
from phalanx.cost.model_shape import ModelShape
from phalanx.cost.serving_efficiency import serving_efficiency
from phalanx.cost.serving_goals import at_rate, largest_load
from phalanx.cost.serving_plans import ServingPlans, serving_plans
from phalanx.cost.serving_steady import Loads, SteadyState, closed_loop, running_limit
from phalanx.cost.serving_step import decode_parts, kv_room_tokens, weight_bytes
from phalanx.errors import JobError
from phalanx.hardware import Cluster
from phalanx.planner.clusters import AskedCluster
from phalanx.planner.request_trace import RequestTrace, poisson
from phalanx.planner.serve_events import PlayedRequests, play_requests
from phalanx.planner.serve_space import EngineSpace, engine_space
from phalanx.planner.serve_split import SplitEngines, best_split

MAX_BATCH = 1024  # requests of one attention replica, as engines limit them
_MANY = 1e6  # requests in flight beyond which nothing gets faster
_PROBES = 4  # of the search for a rate whose 99th percentiles hold
_LEAST_PLAYED, _MOST_PLAYED = 300, 1000  # drawn requests
_PER_IN_FLIGHT = 3  # drawn requests for each that is in flight: a steady state is reached
_COMFORTABLE = 0.8  # of what can be served: shown where nothing is asked or promised


@dataclass(frozen=True, kw_only=True)
class ServeQuestion:
    """What is to be served.

    Attributes:
        prompt_tokens, output_tokens: of a request, on average.
        rate_per_s: arrivals (0: as many as can be served).
        requests: a trace instead of a rate.
        ttft_s, tpot_s: promised: of 99 in 100 requests to the first token; between tokens.
        precision: of the weights.
        software: of the engine, "family:generation".
    """

    prompt_tokens: float
    output_tokens: float
    rate_per_s: float = 0.0
    requests: RequestTrace | None = None
    ttft_s: float = np.inf
    tpot_s: float = np.inf
    precision: str = "bf16"
    software: str = "vllm"

    @property
    def promises(self) -> bool:
        """Whether a time is promised."""
        return bool(np.isfinite(self.ttft_s) or np.isfinite(self.tpot_s))

    @property
    def asked_per_s(self) -> float:
        """Arrivals of the rate or the trace; 0 where neither is given."""
        if self.requests is not None and np.isfinite(self.requests.rate_per_s):
            return self.requests.rate_per_s
        return self.rate_per_s


@dataclass(frozen=True, kw_only=True)
class Engines:
    """Equal engines on a cluster.

    Attributes:
        degrees: tensor, pipeline, expert, attention_dp.
        replicas, idle: engines, and devices that none takes.
        kv_tokens: that the caches of one engine hold.
        weight_bytes: of a device.
        max_running: requests in a batch of one engine.
        loaded: requests/s of the whole cluster that the times below are of.
        ttft_s, tpot_s, latency_s: means at that load.
        most_per_s: the most that meets the promises in the mean; knee_per_s: that can be served.
        parts: what a decoding step at that load is spent on -> seconds.
        keeps: whether it meets the promises at the rate asked.
    """

    degrees: dict[str, int]
    replicas: int
    idle: int
    kv_tokens: float
    weight_bytes: float
    max_running: int
    loaded: float
    ttft_s: Bar
    tpot_s: Bar
    latency_s: Bar
    most_per_s: float
    knee_per_s: float
    parts: dict[str, float]
    keeps: bool

    @property
    def bound_by(self) -> str:
        """What most of a decoding step is spent on."""
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def of_knee(self) -> float:
        """Load over what can be served at all."""
        return self.loaded / self.knee_per_s


@dataclass(frozen=True, kw_only=True)
class ServeAnswer:
    """What one cluster can do.

    Attributes:
        output_tokens: of a request.
        best: None where nothing fits.
        counted: ways that were priced; too_large: of them, without room for one request.
        illegal: reason -> ways.
        played: requests against the best engines: of the trace, or at the rate (the highest that
            keeps the promises, where none is asked).
        played_per_s: their rate; kept_per_s: the highest whose 99th percentiles keep the promises
            (0: none does; None: nothing was promised); in_time: whether what was played did.
        split, split_degrees: engines for prompts beside engines for answers, where times are
            promised: the best such division, and how its engines are cut.
        source: where coefficients come from.
    """

    asked: AskedCluster
    output_tokens: float
    best: Engines | None
    counted: int
    too_large: int
    illegal: Counter[str]
    played: PlayedRequests | None = None
    played_per_s: float = 0.0
    kept_per_s: float | None = None
    in_time: bool = True
    split: SplitEngines | None = None
    split_degrees: Mapping[str, int] | None = None
    source: Sequence[str] = ()

    @property
    def fits(self) -> bool:
        """Whether it serves what is asked within the promises."""
        return self.best is not None and self.best.keeps and self.in_time

    @property
    def usd_per_million_output(self) -> float:
        """Dollars for a million output tokens at the rate played; infinite without a price."""
        assert self.best is not None
        served = min(self.played_per_s or self.best.loaded, self.best.knee_per_s)
        tokens_per_s = served * self.output_tokens
        return self.usd_per_h / 3600 / max(tokens_per_s, 1e-12) * 1e6

    @property
    def usd_per_h(self) -> float:
        """Of the whole cluster."""
        cluster = self.asked.cluster
        return cluster.num_devices * cluster.machine.usd_per_h


def serve_answer(
    shape: ModelShape,
    asked: AskedCluster,
    question: ServeQuestion,
    *,
    plays: bool = True,
    only: Mapping[str, int] | None = None,
) -> ServeAnswer:
    """Price all engines that a cluster could be cut into, and play the best.

    The best serves most requests a second within the promises. Where a rate is asked, it is the one
    with the shortest mean latency of those that keep the promises at that rate.

    Args:
        plays: play requests too; without, formulas alone decide.
        only: columns of `EngineSpace` -> the value to keep to, such as {"tensor": 4}.

    Raises:
        JobError: `job/bad-value` where no legal way keeps to `only`.
    """
    space = engine_space(shape, asked.cluster)
    if only:
        space = _kept(space, only)
    plans = _plans(shape, asked.cluster, space, question)
    loads = _loads(question, len(space))
    longest = question.prompt_tokens + question.output_tokens
    if question.requests is not None:
        each = question.requests.prompt_tokens + question.requests.output_tokens
        longest = max(longest, float(each.max()))
    room = kv_room_tokens(plans, loads.prompt_tokens + loads.answer_tokens / 2)
    fits = np.flatnonzero(room >= longest)
    counts: dict[str, Any] = {
        "asked": asked,
        "output_tokens": question.output_tokens,
        "counted": len(space),
        "too_large": len(space) - len(fits),
        "illegal": space.illegal,
    }
    if not fits.size:
        return ServeAnswer(best=None, **counts)
    priced, cut, load = plans.take(fits), _of(space, fits), loads.take(fits)
    best, row = _best(priced, cut, load, room[fits], question)
    promised = {"ttft_s": question.ttft_s, "tpot_s": question.tpot_s}
    split = best_split(priced, cut.replicas, load, **promised) if question.promises else None
    if split is not None:
        degrees = {name: int(column[split.row]) for name, column in cut.degrees().items()}
        counts |= {"split": split, "split_degrees": degrees}
    source = serving_efficiency().describe(row)
    answer = ServeAnswer(best=best, source=source, **counts)
    return _played(answer, row, question) if plays else answer


def _kept(space: EngineSpace, only: Mapping[str, int]) -> EngineSpace:
    matches = [getattr(space, name) == value for name, value in only.items()]
    chosen = np.flatnonzero(np.logical_and.reduce(matches))
    if not chosen.size:
        asked = ", ".join(f"{name} {value}" for name, value in only.items())
        rule = "no legal engine of this cluster is cut like that"
        legal = [dict(zip(only, row)) for row in zip(*(getattr(space, n).tolist() for n in only))]
        raise JobError("job/bad-value", "engine", asked, rule, legal=legal[:3])
    return _of(space, chosen)


def _plans(
    shape: ModelShape, cluster: Cluster, space: EngineSpace, question: ServeQuestion
) -> ServingPlans:
    degrees: dict[str, Any] = space.degrees()
    numbers = {"precision": question.precision, "software": question.software}
    return serving_plans(shape, cluster.machine, **degrees, **numbers)


def _loads(question: ServeQuestion, count: int) -> Loads:
    return Loads(
        prompt_tokens=np.full(count, float(question.prompt_tokens)),
        answer_tokens=np.full(count, float(question.output_tokens)),
        concurrency=np.ones(count),
    )


def _of(space: EngineSpace, rows: np.ndarray) -> EngineSpace:
    names = ("tensor", "pipeline", "expert", "attention_dp", "replicas", "idle")
    return replace(space, **{name: getattr(space, name)[rows] for name in names})


def _best(
    plans: ServingPlans,
    space: EngineSpace,
    loads: Loads,
    room: np.ndarray,
    question: ServeQuestion,
) -> tuple[Engines, ServingPlans]:
    """The best engines, and their row of the table."""
    rates = serving_efficiency().rates(plans)
    limit = np.minimum(running_limit(plans, loads), MAX_BATCH * plans.attention_dp)
    promised = {"ttft_s": question.ttft_s, "tpot_s": question.tpot_s}
    most, can = largest_load(plans, loads, rates, **promised)
    # beyond what the caches hold requests only wait
    full = closed_loop(plans, replace(loads, concurrency=limit), rates)
    is_over = most.running >= limit
    most_per_s = np.where(is_over, full.requests_per_s, most.requests_per_s) * space.replicas
    knee = closed_loop(plans, replace(loads, concurrency=np.full_like(limit, _MANY)), rates)
    knee_per_s = np.maximum(knee.requests_per_s, full.requests_per_s) * space.replicas
    asked = question.asked_per_s
    score = np.where(can, most_per_s, -1.0 / np.maximum(most_per_s, 1e-12))
    latency_s = most.latency_s
    if asked:
        in_time, latency_s = _at_asked(plans, loads, rates, asked / space.replicas, question)
        in_time &= asked <= knee_per_s
        score = np.where(in_time, np.inf, score)  # any that does it: the quickest of them
    at = int(np.lexsort((-latency_s, score))[-1])
    row, one = plans.take(np.asarray([at])), loads.take(np.asarray([at]))
    own = serving_efficiency().rates(row)
    loaded = min(asked, float(knee_per_s[at])) if asked else float(most_per_s[at])
    if not (asked or question.promises):
        loaded *= _COMFORTABLE
    state, _ = at_rate(row, one, own, np.asarray([loaded / space.replicas[at]]))
    keeps = bool(in_time[at]) if asked else bool(can[at])
    return _engines(row, one, own, state, space, at, room, limit,
                    loaded=loaded, most_per_s=float(most_per_s[at]),
                    knee_per_s=float(knee_per_s[at]), keeps=keeps), row  # fmt: skip


def _at_asked(
    plans: ServingPlans,
    loads: Loads,
    rates: dict[str, np.ndarray],
    each_per_s: np.ndarray,
    question: ServeQuestion,
) -> tuple[np.ndarray, np.ndarray]:
    """Which ways keep the promises at the rate asked, in the mean, and their latency there."""
    state, keeps_up = at_rate(plans, loads, rates, each_per_s)
    is_soon = (state.ttft_s <= question.ttft_s) & (state.tpot_s <= question.tpot_s)
    return keeps_up & is_soon, state.latency_s


def _engines(
    row: ServingPlans,
    load: Loads,
    rates: dict[str, np.ndarray],
    state: SteadyState,
    space: EngineSpace,
    at: int,
    room: np.ndarray,
    limit: np.ndarray,
    **numbers: Any,
) -> Engines:
    rows = np.maximum(state.running / row.attention_dp, 1.0)
    context = load.prompt_tokens + load.answer_tokens / 2
    parts = decode_parts(row, rows, context, rates)
    bars: dict[str, Any] = {
        name: _bar(name, float(getattr(state, name)[0]))
        for name in ("ttft_s", "tpot_s", "latency_s")
    }
    return Engines(
        degrees={name: int(column[at]) for name, column in space.degrees().items()},
        replicas=int(space.replicas[at]),
        idle=int(space.idle[at]),
        kv_tokens=float(room[at] * row.attention_dp[0]),
        weight_bytes=float(weight_bytes(row)[0]),
        max_running=max(1, int(limit[at])),
        parts={name: float(seconds[0]) for name, seconds in parts.items()},
        **bars,
        **numbers,
    )


def _bar(name: str, value: float) -> Bar:
    low, high = serving_efficiency().bar(name, "closed vllm", "closed", "all")
    return Bar(value, value * low, value * high)


# ---- requests played -------------------------------------------------------------------------


def _played(answer: ServeAnswer, row: ServingPlans, question: ServeQuestion) -> ServeAnswer:
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
