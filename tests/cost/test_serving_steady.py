"""Engines under steady loads: what goes in comes out, and more load never helps a request."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost.serving_efficiency import serving_efficiency
from phalanx.cost.serving_plans import serving_plans
from phalanx.cost.serving_steady import (
    Loads,
    closed_loop,
    decode_time,
    running_limit,
    saturated,
    split_engines,
    static_batch,
)
from phalanx.hardware import read_machine
from phalanx.models.known import known_shape

PLANS = serving_plans(
    known_shape("meta-llama/Llama-3.1-70B"),
    read_machine("h100"),
    tensor=4,
    precision="fp8",
    software="vllm:0.19",
)
EFFICIENCY = serving_efficiency()
RATES = EFFICIENCY.rates(PLANS)
ONE = np.ones(1)


def load(concurrency, prompt=1000.0, answer=300.0):
    return Loads(
        prompt_tokens=np.asarray([prompt]),
        answer_tokens=np.asarray([answer]),
        concurrency=np.asarray([float(concurrency)]),
    )


def split(concurrency, prompts=2.0, answers=3.0, **lengths):
    workers = (prompts * ONE, answers * ONE)
    return split_engines(PLANS, PLANS, workers, load(concurrency, **lengths), RATES)


loads = st.builds(load, st.floats(1, 5000), st.floats(10, 30000), st.floats(2, 5000))


@given(loads)
def test_concurrency_is_throughput_times_latency(each):
    for state in (closed_loop(PLANS, each, RATES), static_batch(PLANS, each, RATES)):
        assert state.requests_per_s * state.latency_s == pytest.approx(each.concurrency)


@given(loads, st.floats(1.05, 4))
def test_more_requests_never_make_one_faster(each, more):
    crowded = load(each.concurrency[0] * more, each.prompt_tokens[0], each.answer_tokens[0])
    alone, busy = closed_loop(PLANS, each, RATES), closed_loop(PLANS, crowded, RATES)
    assert busy.tpot_s >= alone.tpot_s * (1 - 1e-9)
    assert busy.requests_per_s >= alone.requests_per_s * 0.95  # and the engine serves no fewer


def test_requests_beyond_the_caches_wait():
    limit = running_limit(PLANS, load(1))[0]
    full, over = (closed_loop(PLANS, load(limit * times), RATES) for times in (1, 3))
    assert over.running[0] == pytest.approx(limit)
    assert over.tpot_s[0] == pytest.approx(full.tpot_s[0])
    assert over.ttft_s[0] > 2 * full.latency_s[0]


def test_a_lone_request_decodes_at_the_price_of_a_step():
    state = closed_loop(PLANS, load(1), RATES)
    assert state.tpot_s[0] == pytest.approx(decode_time(PLANS, load(1), ONE, RATES)[0])


def test_a_load_without_end_is_served_at_the_limit_of_the_caches():
    endless = saturated(PLANS, load(np.inf), RATES)
    at_limit = closed_loop(PLANS, load(running_limit(PLANS, load(1))[0]), RATES)
    assert endless.requests_per_s[0] == pytest.approx(at_limit.requests_per_s[0])
    assert endless.output_tokens_per_s[0] == pytest.approx(300 * at_limit.requests_per_s[0])


@given(st.floats(1, 3000))
def test_split_engines_keep_what_comes_in(concurrency):
    state = split(concurrency)
    assert state.requests_per_s * state.latency_s == pytest.approx(concurrency)
    assert state.running[0] <= concurrency * (1 + 1e-9)


def test_prompts_that_cannot_keep_up_set_the_pace():
    """One engine for prompts, many for answers: more of the latter change nothing."""
    few, many = (split(500, 1, answers, prompt=20000.0, answer=20.0) for answers in (20, 40))
    assert few.requests_per_s[0] == pytest.approx(many.requests_per_s[0], rel=0.02)
    faster = split(500, 2, 20, prompt=20000.0, answer=20.0)
    assert faster.requests_per_s[0] == pytest.approx(2 * few.requests_per_s[0], rel=0.1)


def test_answer_engines_alone_are_not_disturbed_by_prompts():
    shared = closed_loop(PLANS, load(256, prompt=8000.0), RATES)
    apart = split(256, 3, 1, prompt=8000.0)
    assert apart.tpot_s[0] < shared.tpot_s[0]


def test_what_all_prompts_share_is_kept_once():
    """Room for n prompts' caches R / c; with s shared by all (R - s) / (c - s)."""
    plain = load(1, prompt=8000.0, answer=200.0)
    shared = dataclasses.replace(plain, shared_tokens=np.asarray([6000.0]))
    room = running_limit(PLANS, plain) * 8100.0
    assert running_limit(PLANS, shared) == pytest.approx((room - 6000.0) / 2100.0)


@given(loads, st.floats(0.0, 0.99))
def test_what_is_cached_never_makes_a_request_slower(each, frac):
    cached = dataclasses.replace(each, reused_tokens=each.prompt_tokens * frac)
    plain, sooner = (closed_loop(PLANS, load_, RATES) for load_ in (each, cached))
    assert sooner.latency_s <= plain.latency_s * (1 + 1e-9)
