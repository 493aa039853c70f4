"""Metrics against hand-made times, as the text that a monitoring system reads."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from phalanx.engines.serve import process
from phalanx.engines.serve.client import EngineClient
from phalanx.engines.serve.metrics import RequestTimes, ServeMetrics
from phalanx.engines.serve.settings import Sampling, ServeSettings
from phalanx.errors import PhalanxError
from tests.engines import scripted_core as script


def samples_of(metrics: ServeMetrics) -> dict[str, float]:
    """Name, with its label's value if it has one, to number; of buckets only those below 2 s."""
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            label = ",".join(sample.labels.values())
            found[sample.name + (f"[{label}]" if label else "")] = sample.value
    return found


def test_times_by_hand():
    metrics = ServeMetrics()
    times = RequestTimes(metrics, 100.0)
    times.start(100.25)
    times.start(104.0)  # a second step does not make it wait again
    for now_s in (101.0, 101.5, 103.0):
        times.token(now_s)
    times.end("length")
    single = RequestTimes(metrics, 200.0)
    single.token(200.5)
    single.end("stop")
    RequestTimes(metrics, 300.0).end("cancelled")
    value = samples_of(metrics)
    assert value["phalanx_queue_seconds_sum"] == 0.25
    assert value["phalanx_time_to_first_token_seconds_sum"] == 1.5
    assert value["phalanx_time_to_first_token_seconds_count"] == 2
    assert value["phalanx_time_to_first_token_seconds_bucket[0.5]"] == 1
    assert value["phalanx_inter_token_seconds_sum"] == 2.0
    assert value["phalanx_inter_token_seconds_count"] == 2
    assert value["phalanx_time_per_output_token_seconds_sum"] == 1.0
    assert value["phalanx_time_per_output_token_seconds_count"] == 1, "one token has none"
    assert value["phalanx_request_seconds_sum"] == 3.5
    assert value["phalanx_generation_tokens_total"] == 4
    assert value["phalanx_requests_finished_total[length]"] == 1
    assert value["phalanx_requests_finished_total[cancelled]"] == 1
    assert value["phalanx_requests_finished_total[error]"] == 0


def test_counters_of_the_engine_go_on_where_a_new_engine_begins_at_0():
    metrics = ServeMetrics()
    counters = {"prompt_tokens": 40, "preempted": 2, "free_blocks": 3, "num_blocks": 4}
    metrics.absorb(counters, 2, 5)
    metrics.absorb(counters | {"prompt_tokens": 50}, 1, 5)
    metrics.new_engine()
    metrics.absorb(counters | {"prompt_tokens": 7, "preempted": 0, "free_blocks": 4}, 0, 0)
    value = samples_of(metrics)
    assert value["phalanx_prompt_tokens_total"] == 57
    assert value["phalanx_preemptions_total"] == 2
    assert value["phalanx_kv_usage_ratio"] == 0
    metrics.absorb(counters, 2, 5)
    value = samples_of(metrics)
    assert value["phalanx_kv_usage_ratio"] == 0.25
    assert (value["phalanx_requests_running"], value["phalanx_requests_waiting"]) == (2, 3)


def test_two_servers_of_a_program_share_no_number():
    one, other = ServeMetrics(), ServeMetrics()
    one.restarts.inc()
    assert samples_of(one)["phalanx_engine_restarts_total"] == 1
    assert samples_of(other)["phalanx_engine_restarts_total"] == 0


@pytest.mark.dist
@pytest.mark.timeout(120)
def test_what_happens_to_requests_is_what_the_metrics_say(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_CORE", "tests.engines.scripted_core")

    async def work() -> None:
        settings = ServeSettings(folder=str(tmp_path), scheduler="continuous", max_tokens=64)
        client = await EngineClient.start(settings)
        try:
            prompt = [script.NOTHING_WRONG, 1]
            for num in (1, 4):
                assert len([d async for d in client.submit(prompt, Sampling(max_new=num))]) == num
            client.submit([script.FORGET, 1], Sampling(max_new=2)).close("stop")
            open_one = client.submit([script.FORGET, 1], Sampling(max_new=2))
            for tokens, adapter in (([], ""), ([5] * 64, ""), ([500], ""), ([5], "none")):
                with pytest.raises(PhalanxError):
                    client.submit(tokens, Sampling(max_new=1), adapter)
            while samples_of(client.metrics)["phalanx_requests_waiting"] != 1:
                await asyncio.sleep(0.05)  # a beat says so
            value = samples_of(client.metrics)
            assert value["phalanx_requests_waiting"] == 1
            assert value["phalanx_requests_running"] == 0
            assert value["phalanx_engine_up"] == 1
            open_one.close()
            with pytest.raises(PhalanxError):
                [d async for d in client.submit([script.EXIT], Sampling(max_new=1))]
            assert samples_of(client.metrics)["phalanx_engine_up"] == 0
        finally:
            await client.close()
        value = samples_of(client.metrics)
        finished = [value[f"phalanx_requests_finished_total[{each}]"] for each in ENDS]
        assert finished == [1, 2, 1, 1]
        assert value["phalanx_requests_refused_total[serve/request]"] == 3
        assert value["phalanx_requests_refused_total[serve/adapter]"] == 1
        assert value["phalanx_generation_tokens_total"] == 5
        assert value["phalanx_inter_token_seconds_count"] == 3
        assert value["phalanx_queue_seconds_count"] == 2
        assert value["phalanx_prompt_tokens_total"] == script.COUNTERS["prompt_tokens"]

    asyncio.run(work())


ENDS = ("stop", "length", "cancelled", "error")
