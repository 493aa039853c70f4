"""A forecast is the job's own scheduler in virtual time, told by the definitions of a load test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from phalanx.bench_load import summarise
from phalanx.cost.serving import EngineCost, ServeRates, windows_of
from phalanx.errors import JobError, PlanError
from phalanx.models.spec import small_config
from phalanx.planner.serving import arrivals, play_load, predict_load
from phalanx.policies.serve.continuous import Continuous
from phalanx.policies.serve.prefill_first import PrefillFirst

CONFIG = small_config(
    vocab_size=101,
    hidden_size=48,
    intermediate_size=80,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    window=21,
    full_every=2,
)
RATES = ServeRates(  # a millisecond a token and one for each row of the head, 10 ms a step
    layers_s=[(1, 0.011), (2, 0.012)],
    head_s=[(1, 0.001), (2, 0.002)],
    kv_token_s=0.0,
    pair_s=0.0,
    windows=windows_of(CONFIG),
)
LIMITS = {"max_running": 3, "max_tokens": 100, "max_step_tokens": 20, "kv_tokens": 301}


def forecast(scheduler: str | Mapping[str, Any] = "continuous", **options: Any) -> dict[str, float]:
    given = {"prompt_lens": [30, 7], "output_tokens": 3, "request_s": 0.0} | LIMITS | options
    report = predict_load(RATES, CONFIG, scheduler=scheduler, **given)
    assert {row.source for row in report.rows} == {"formula", "simulated"}
    assert all(row.note for row in report.rows)
    return {row.quantity: row.value for row in report.rows}


def test_a_load_of_two_requests_is_worked_out_by_hand():
    # step 1: 20 tokens of the first prompt. Step 2: its last 10 and the other's 7, two ends.
    # Steps 3 and 4: both decode.
    ends = [0.030, 0.030 + 0.027 + 0.002, 0.073, 0.087]
    rows = forecast()
    assert rows["load/TTFT median"] == pytest.approx(ends[1], rel=1e-9)
    assert rows["load/TPOT median"] == pytest.approx(0.014, rel=1e-9)
    assert rows["load/duration"] == rows["load/latency median"] == pytest.approx(ends[3], rel=1e-9)
    assert rows["load/output tokens per second"] == pytest.approx(6 / ends[3], rel=1e-9)
    assert rows["load/tokens per second"] == pytest.approx(43 / ends[3], rel=1e-9)


def test_the_jobs_scheduler_and_its_options_decide():
    chunked = forecast({"name": "continuous", "chunk": 5})
    first = forecast("prefill_first", max_step_tokens=30)
    plain = forecast(max_step_tokens=30)
    # prefill first: 30 tokens, then 7; both known when the second ended
    assert first["load/TTFT median"] == pytest.approx((0.041 + 0.041 + 0.018) / 2, rel=1e-9)
    values = {each["load/TTFT median"] for each in (chunked, first, plain)}
    assert len(values) == 3


def test_the_first_request_starts_while_the_others_are_on_their_way():
    # engine steps: 7 tokens of the first from 1 ms on; both others; then all decode
    first = 0.001 + 0.017 + 0.001
    second = first + 0.011 + 14 * 0.001 + 0.003
    rows = forecast(prompt_lens=[7, 7, 7], output_tokens=2, request_s=0.001)
    assert rows["load/TTFT median"] == pytest.approx(second, rel=1e-9)
    assert rows["load/duration"] == pytest.approx(second + 0.011 + 0.001 + 0.002, rel=1e-9)
    together = forecast(prompt_lens=[7, 7, 7], output_tokens=2)
    assert together["load/TTFT median"] < second


def test_requests_beyond_the_batch_wait():
    alone = forecast(prompt_lens=[9] * 3)["load/duration"]
    assert forecast(prompt_lens=[9] * 6, max_running=3)["load/duration"] > 1.5 * alone


@pytest.mark.parametrize(("kv_tokens", "said"), [(301, 304), (304, 304), (100, 112)])
def test_the_cache_is_what_the_server_says_whole_blocks(kv_tokens, said):
    assert forecast(kv_tokens=kv_tokens)["serving/KV tokens"] == said


def test_a_small_cache_makes_requests_wait_for_one_another():
    few = forecast("prefill_first", prompt_lens=[50] * 3, output_tokens=50, kv_tokens=112)
    many = forecast("prefill_first", prompt_lens=[50] * 3, output_tokens=50, kv_tokens=336)
    assert few["load/TTFT median"] > 4 * many["load/TTFT median"]


def test_arrivals_are_those_of_the_load_test():
    assert arrivals(3, 0.0, 5) == [0.0, 0.0, 0.0]
    moments = arrivals(4000, 8.0, 5)
    assert moments[0] == 0.0 and moments == sorted(moments)
    assert moments == arrivals(4000, 8.0, 5) != arrivals(4000, 8.0, 6)
    assert moments[-1] / 3999 == pytest.approx(1 / 8, rel=0.05)
    slow = forecast(rate_per_s=0.01)
    assert slow["load/TTFT median"] == pytest.approx((0.030 + 0.021 + 0.018) / 2, rel=1e-9)


def test_a_forecast_is_summed_up_by_the_load_tests_own_definitions():
    cost = EngineCost(lambda batch: 0.01 * batch.num_tokens)
    for policy in (Continuous(), PrefillFirst()):
        samples = play_load(
            policy,
            cost,
            sent_s=[0.0, 0.25],
            prompt_lens=[30, 7],
            output_tokens=4,
            num_blocks=9,
            max_running=2,
            max_step_tokens=32,
        )
        assert [len(each.output_s) for each in samples] == [4, 4]
        assert [each.sent_s for each in samples] == [0.0, 0.25]
        rows = {row.quantity: row.value for row in summarise(samples, 1.0).rows}
        assert rows["load/requests"] == 2 and rows["load/TTFT median"] > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_lens": []},
        {"prompt_lens": [98, 5]},
        {"output_tokens": 0},
        {"prompt_lens": [0, 5]},
    ],
)
def test_a_load_that_cannot_be_is_refused(wrong):
    with pytest.raises(JobError, match=r"2\.\.100 tokens"):
        forecast(**wrong)


def test_options_beyond_the_engine_are_refused():
    with pytest.raises(PlanError, match=r"must lie in 3\.\.20"):
        forecast({"name": "continuous", "max_step_tokens": 40})
    with pytest.raises(JobError, match="continuous"):
        forecast("continous")
