"""The arithmetic of a load test."""

from __future__ import annotations

import pytest

from phalanx.bench_load import Sample, percentile, summarise


def test_percentiles_lie_between_the_nearest_ranks():
    values = [4.0, 1.0, 3.0, 2.0]
    assert percentile(values, 0.0) == 1.0
    assert percentile(values, 0.5) == 2.5
    assert percentile(values, 0.99) == pytest.approx(3.97)
    assert percentile([7.0], 0.99) == 7.0


def test_rows_by_hand():
    samples = [
        Sample(sent_s=0.0, output_s=[1.0, 2.0, 4.0], num_prompt=10, num_output=3),
        Sample(sent_s=1.0, output_s=[4.0], num_prompt=5, num_output=1),
        Sample(sent_s=1.0, error="refused"),
    ]
    value = {row.quantity: row.value for row in summarise(samples, 5.0).rows}
    assert value["load/requests"] == 2 and value["load/failed requests"] == 1
    assert value["load/output tokens per second"] == 4 / 5
    assert value["load/tokens per second"] == 19 / 5
    assert value["load/TTFT mean"] == (1.0 + 3.0) / 2
    assert value["load/TPOT mean"] == 3.0 / 2  # the request with one token has none
    assert value["load/ITL median"] == 1.5
    assert value["load/latency P99"] == pytest.approx(3.0 + 0.99)


def test_several_tokens_in_one_part_do_not_shorten_the_time_per_token():
    sample = Sample(sent_s=0.0, output_s=[1.0, 3.0], num_prompt=1, num_output=5)
    value = {row.quantity: row.value for row in summarise([sample], 3.0).rows}
    assert value["load/TPOT mean"] == 2.0 / 4
    assert value["load/ITL mean"] == 2.0
