"""Requests played against priced engines: the same decisions as the event world, and its limits."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cost.serving import EngineCost
from phalanx.cost.serving_efficiency import serving_efficiency
from phalanx.cost.serving_plans import serving_plans
from phalanx.cost.serving_steady import Loads, decode_time, prompt_times
from phalanx.drive import drive
from phalanx.errors import JobError
from phalanx.hardware import parse_cluster
from phalanx.mesh import Mesh
from phalanx.models.known import known_shape
from phalanx.planner.request_trace import RequestTrace, poisson, read_requests
from phalanx.planner.serve_events import StepPrices, play_requests
from phalanx.policies.serve import BatchPlan
from phalanx.registry import build
from phalanx.worlds.sim import SimWorld
from phalanx.worlds.sim_serving import SimEngine, SimRequest, play_engine

SHAPE = known_shape("llama-3.1-8b")
PLAN = serving_plans(SHAPE, parse_cluster("8xh100").machine, precision="fp8")
RATES = serving_efficiency().rates(PLAN)
ROOM = {"kv_tokens": 400_000.0, "max_running": 256}
requests = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=12
)


def step_s(batch: BatchPlan) -> float:
    return 1.0 + sum(batch.query_len) / 8 + sum(batch.kv_len) / 64


def batch(*rows: tuple[int, int]) -> BatchPlan:
    """Rows of (query_len, kv_len)."""
    query_len, kv_len = ([row[at] for row in rows] for at in (0, 1))
    count = len(rows)
    return BatchPlan(range(count), query_len, kv_len, [0] * count, [-1] * count, [-1] * count)


@settings(max_examples=40, deadline=None)
@given(requests, st.integers(4, 12), st.sampled_from(["continuous", "prefill_first"]))
def test_an_engine_alone_lives_through_what_it_does_in_the_event_world(drawn, num_blocks, name):
    moments = sorted(moment for moment, _, _ in drawn)
    asked = [
        SimRequest(id=at, arrive_s=float(moment), prompt_len=prompt, max_new=new, num_new=new)
        for at, (moment, (_, prompt, new)) in enumerate(zip(moments, drawn))
    ]
    limits = {"num_blocks": num_blocks, "max_running": 3, "max_step_tokens": 16}
    alone, in_world = SimEngine(asked, **limits), SimEngine(asked, **limits)
    play_engine(alone, build("serve", name), step_s)
    world = SimWorld(
        Mesh(engine=1), EngineCost(step_s), facts=in_world.facts, outcomes=in_world.outcomes
    )
    world.post(*in_world.arrivals())
    drive(world, reacts=[build("serve", name)])
    assert alone.token_s == in_world.token_s
    assert alone.finish_s == in_world.finish_s
    assert alone.num_preempted == in_world.num_preempted


def test_prices_are_those_of_the_formulas():
    """A decoding step of 50 rows and a lone prompt, within what interpolation costs."""
    prices = StepPrices(PLAN, RATES, most_rows=256, longest=4096)
    one = np.ones(1)
    loads = Loads(prompt_tokens=1024 * one, answer_tokens=256 * one, concurrency=one)
    decoding = prices.batch_s(batch(*[(1, 1152)] * 50))
    assert decoding == pytest.approx(float(decode_time(PLAN, loads, 50 * one, RATES)[0]), rel=0.02)
    lone = prices.batch_s(batch((1024, 0)))
    assert lone == pytest.approx(float(prompt_times(PLAN, loads, RATES, one)[0][0]), rel=0.02)


def test_chunks_of_a_prompt_cost_the_whole_and_their_starts():
    prices = StepPrices(PLAN, RATES, most_rows=256, longest=4096)
    whole = prices.batch_s(batch((2048, 0)))
    chunks = prices.batch_s(batch((1024, 0))) + prices.batch_s(batch((1024, 1024)))
    assert whole < chunks < whole + 2 * prices.batch_s(batch((1, 0)))


def test_a_request_alone_waits_for_its_prompt_and_its_steps():
    alone = play_requests(PLAN, RATES, poisson(1.0, 1, 1024, 11), **ROOM)
    prices = StepPrices(PLAN, RATES, most_rows=256, longest=1035)
    step = prices.batch_s(batch((1, 1029)))
    assert alone.tpot_s[0] == pytest.approx(step, rel=0.02)
    assert alone.ttft_s[0] > prices.batch_s(batch((1024, 0)))
    assert alone.latency_s[0] == pytest.approx(alone.ttft_s[0] + 10 * alone.tpot_s[0], rel=1e-6)


def test_more_requests_a_second_wait_longer_and_more_engines_wait_less():
    slow, fast = (
        play_requests(PLAN, RATES, poisson(rate, 80, 1024, 48), **ROOM) for rate in (4.0, 30.0)
    )
    assert fast.tpot_s.mean() > slow.tpot_s.mean()
    assert fast.percentiles("ttft_s")[1] > slow.percentiles("ttft_s")[1]
    shared = play_requests(PLAN, RATES, poisson(30.0, 80, 1024, 48), **ROOM, engines=4)
    assert len(shared.ttft_s) == 80
    assert shared.tpot_s.mean() < fast.tpot_s.mean()


def test_one_output_token_has_no_time_between_tokens():
    played = play_requests(PLAN, RATES, poisson(1.0, 3, 64, 1), **ROOM)
    assert not len(played.tpot_s)
    assert np.isnan(played.percentiles("tpot_s")).all()


def test_a_request_that_no_cache_holds_is_an_error():
    with pytest.raises(JobError) as caught:
        play_requests(PLAN, RATES, poisson(1.0, 1, 4096, 64), kv_tokens=1024.0, max_running=8)
    assert caught.value.code == "serve/request"


# ---- files of requests -------------------------------------------------------------------------


def row(**values) -> str:
    return json.dumps({"arrival_s": 0.0, "prompt_tokens": 10, "output_tokens": 5} | values)


def test_json_lines_and_csv_hold_the_same_requests(tmp_path):
    lines, table = tmp_path / "t.jsonl", tmp_path / "t.csv"
    lines.write_text(f"{row(arrival_s=3)}\n\n{row(arrival_s=4.5, prompt_tokens=7)}\n")
    table.write_text("arrival_s,prompt_tokens,output_tokens,note\n3,10,5,a\n4.5,7,5,b\n")
    for path in (lines, table):
        found = read_requests(str(path))
        assert found.arrival_s.tolist() == [0.0, 1.5]
        assert found.prompt_tokens.tolist() == [10, 7]
        assert found.rate_per_s == pytest.approx(1 / 1.5)


def test_engines_take_turns():
    trace = RequestTrace(np.arange(7.0), np.arange(1, 8), np.ones(7, dtype=int), "")
    assert [len(trace.every(3, first)) for first in range(3)] == [3, 2, 2]
    assert trace.every(3, 1).prompt_tokens.tolist() == [2, 5]


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("", "data/empty", "no request"),
        ("{", "job/syntax", "line 1"),
        ("[1]", "job/syntax", "object"),
        (row(prompt_tokens=None), "job/missing", "prompt_tokens"),
        (row(arrival_s=-1), "job/bad-value", "arrival_s"),
        (row(arrival_s=float("nan")), "job/bad-value", "arrival_s"),
        (row(arrival_s=True), "job/bad-value", "arrival_s"),
        (row(output_tokens=0), "job/bad-value", "output_tokens"),
        (row(output_tokens=2.5), "job/bad-value", "whole number"),
        (row(prompt_tokens="many"), "job/bad-value", "prompt_tokens"),
        (f"{row(arrival_s=2)}\n{row(arrival_s=1)}", "job/bad-value", "request 2"),
    ],
)
def test_a_trace_that_cannot_be_played_is_one_clear_error(tmp_path, text, code, says):
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(JobError, match=says) as caught:
        read_requests(str(path))
    assert caught.value.code == code
    assert "\n" not in str(caught.value)


def test_a_trace_that_is_not_there_is_one_clear_error(tmp_path):
    with pytest.raises(JobError) as caught:
        read_requests(str(tmp_path / "none.csv"))
    assert caught.value.code == "job/not-found"
