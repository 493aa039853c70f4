"""What a cluster can serve of a model: the best engines for it, what they promise, what they cost.

Times of a steady load are formulas with fitted shares (`cost.serving_steady`) and carry the bars of
their cross-validation; percentiles come from requests played against the real scheduler
(`serve_events`). No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
from phalanx.planner.serve_answers import Engines, ServeAnswer, ServeQuestion
from phalanx.planner.serve_played import with_requests_played
from phalanx.planner.serve_reuse import expected_reuse
from phalanx.planner.serve_space import EngineSpace, engine_space
from phalanx.planner.serve_split import best_split

MAX_BATCH = 1024  # requests of one attention replica, as engines limit them
_MANY = 1e6  # requests in flight beyond which nothing gets faster
_REUSE_ROUNDS = 2
_COMFORTABLE = 0.8  # of what can be served: shown where nothing is asked or promised

__all__ = ["Engines", "ServeAnswer", "ServeQuestion", "serve_answer"]


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

    Where prompts begin alike and engines reuse that, the answer holds the same engines without it
    too (formulas alone), whose room for caches says what a trace finds again.

    Raises:
        JobError: `job/bad-value` where no legal way keeps to `only`.
    """
    if not (question.reuses_prefixes and question.names_prefixes):
        return _answer(shape, asked, question, plays=plays, only=only)
    alone = replace(question, reuses_prefixes=False)
    without = _answer(shape, asked, alone, plays=False, only=only)
    if without.best is None:
        return without
    for _ in range(_REUSE_ROUNDS):  # the cut decides what is cached, and that decides the cut
        own = replace(question, reused_tokens=expected_reuse(question, without.best))
        answer = _answer(shape, asked, own, plays=False, only=only)
        assert answer.best is not None and without.best is not None
        if answer.best.degrees == without.best.degrees:
            break
        without = _answer(shape, asked, alone, plays=False, only=answer.best.degrees)
    if plays:
        answer = _answer(shape, asked, own, plays=True, only=only)
    return replace(answer, without_reuse=without)


def _answer(
    shape: ModelShape,
    asked: AskedCluster,
    question: ServeQuestion,
    *,
    plays: bool,
    only: Mapping[str, int] | None,
) -> ServeAnswer:
    """For one assumption about reuse."""
    space = engine_space(shape, asked.cluster)
    if only:
        space = _kept(space, only)
    plans = _plans(shape, asked.cluster, space, question)
    loads = _loads(question, len(space))
    room = kv_room_tokens(plans, loads.prompt_tokens + loads.answer_tokens / 2)
    fits = np.flatnonzero(room >= question.longest_tokens)
    counts: dict[str, Any] = {
        "asked": asked,
        "output_tokens": question.output_tokens,
        "counted": len(space),
        "too_large": len(space) - len(fits),
        "illegal": space.illegal,
        "reused_tokens": question.reused_tokens,
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
    source = [*serving_efficiency().describe(row), *_units_note(asked.cluster, question)]
    answer = ServeAnswer(best=best, source=source, **counts)
    return with_requests_played(answer, row, question) if plays else answer


def _units_note(cluster: Cluster, question: ServeQuestion) -> list[str]:
    """What is said of weights in numbers that a device cannot multiply."""
    peak = {"fp8": cluster.machine.fp8_peak, "fp4": cluster.machine.fp4_peak}
    if peak.get(question.precision, 0) is not None:
        return []
    return [f"no {question.precision} units: weights are kept in it and multiplied in bf16"]


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
        reused_tokens=np.full(count, question.reused_tokens),
        # a trace does not say what requests that run at the same time have in common
        shared_tokens=np.full(count, 0.0 if question.requests else question.reused_tokens),
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
    batch = question.max_running or MAX_BATCH
    limit = np.minimum(running_limit(plans, loads), batch * plans.attention_dp)
    promised = {"ttft_s": question.ttft_s, "tpot_s": question.tpot_s}
    most, can = largest_load(plans, loads, rates, **promised)
    # beyond what the caches hold requests only wait
    full = closed_loop(plans, replace(loads, concurrency=limit), rates)
    is_over = most.running >= limit
    most_per_s = np.where(is_over, full.requests_per_s, most.requests_per_s) * space.replicas
    knee = closed_loop(plans, replace(loads, concurrency=np.full_like(limit, _MANY)), rates)
    beyond = 0.0 if question.max_running else knee.requests_per_s  # a stated limit is kept to
    knee_per_s = np.maximum(beyond, full.requests_per_s) * space.replicas
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
