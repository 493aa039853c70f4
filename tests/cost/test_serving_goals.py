"""Inverse questions give back what the direct ones say."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cost.serving_efficiency import serving_efficiency
from phalanx.cost.serving_goals import at_rate, largest_load, trace_at_rate
from phalanx.cost.serving_plans import serving_plans
from phalanx.cost.serving_steady import Loads, closed_loop
from phalanx.hardware import read_machine
from phalanx.models.known import known_shape

PLANS = serving_plans(
    known_shape("meta-llama/Llama-3.1-70B"),
    read_machine("h100"),
    tensor=[2, 4, 8],
    precision="fp8",
    software="vllm:0.19",
)
# no start of the load: its first requests' cost shrinks with concurrency and is no steady state
RATES = serving_efficiency().rates(PLANS) | {"warm_s": np.zeros(3)}
LENGTHS = Loads(
    prompt_tokens=np.full(3, 1000.0),
    answer_tokens=np.full(3, 300.0),
    concurrency=np.ones(3),
)


@settings(max_examples=20)
@given(st.floats(1, 200))
def test_a_rate_brings_as_many_requests_as_serve_it(concurrency):
    load = Loads(
        prompt_tokens=LENGTHS.prompt_tokens,
        answer_tokens=LENGTHS.answer_tokens,
        concurrency=np.full(3, concurrency),
    )
    state = closed_loop(PLANS, load, RATES)
    found, keeps_up = at_rate(PLANS, LENGTHS, RATES, state.requests_per_s)
    assert keeps_up.all()
    assert found.requests_per_s == pytest.approx(state.requests_per_s, rel=2e-3)


def test_a_rate_beyond_an_engine_is_said_to_be():
    _, keeps_up = at_rate(PLANS, LENGTHS, RATES, np.asarray([1e-3, 1e4, 1e4]))
    assert keeps_up.tolist() == [True, False, False]


def test_promises_are_kept_and_used_up():
    state, is_kept = largest_load(PLANS, LENGTHS, RATES, tpot_s=0.025, ttft_s=0.5)
    assert is_kept.all()
    assert (state.tpot_s <= 0.025).all() and (state.ttft_s <= 0.5).all()
    used = np.maximum(state.tpot_s / 0.025, state.ttft_s / 0.5)
    assert used == pytest.approx(1.0, rel=1e-3)
    assert (np.diff(state.requests_per_s) > 0).all()  # more ranks, more requests within promises


def test_promises_that_no_load_keeps_are_said_so():
    _, is_kept = largest_load(PLANS, LENGTHS, RATES, tpot_s=1e-6)
    assert not is_kept.any()


def test_a_trace_that_an_engine_keeps_up_with_sees_its_steady_state():
    rate = np.full(3, 0.5)
    steady, _ = at_rate(PLANS, LENGTHS, RATES, rate)
    loads = dataclasses.replace(LENGTHS, concurrency=np.full(3, 256.0))
    trace = trace_at_rate(PLANS, loads, RATES, rate, np.full(3, 1000.0))
    assert trace.ttft_s == pytest.approx(steady.ttft_s)
    assert trace.requests_per_s == pytest.approx(rate, rel=0.02)


def test_waits_of_a_trace_beyond_an_engine_grow_with_its_length():
    loads = dataclasses.replace(LENGTHS, concurrency=np.full(3, 8.0))
    short, long = (
        trace_at_rate(PLANS, loads, RATES, np.full(3, 100.0), np.full(3, count))
        for count in (400.0, 800.0)
    )
    assert long.ttft_s == pytest.approx(2 * short.ttft_s, rel=0.1)
    served = closed_loop(PLANS, loads, RATES).requests_per_s
    assert long.requests_per_s == pytest.approx(served, rel=0.02)
