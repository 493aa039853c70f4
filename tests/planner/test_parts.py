"""A plan for each part of a mixed cluster: shares by speed, gradients over the slowest link."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.models.named import named_model
from phalanx.models.spec import lora_tensors
from phalanx.planner.clusters import asked_clusters
from phalanx.planner.parts import by_parts, num_trained, whole_shares
from phalanx.planner.search import answer
from tests.planner.plan_cases import CONFIG, LORA, asked, training

FIXED = {"profile": None, "seq_tokens": 512, "batch_tokens": 64 * 512, "steps": 10, "epochs": 0}
LARGE = FIXED | {"config": named_model("llama-3.1-8b").config, "method": "lora"}
SITES = """
[[groups]]
site = "paris"
machine = "h100"
devices = 2
[[groups]]
site = "oslo"
machine = "h100"
devices = 2
[[links]]
between = ["paris", "oslo"]
bandwidth = "8 Gbit/s"
latency = "10 ms"
"""


def mixed(text):
    return asked_clusters(text)[0]


def test_a_cluster_of_one_kind_has_no_parts():
    assert by_parts(training(), asked()) is None


@pytest.mark.parametrize("changes", [LARGE, {}])
def test_the_faster_part_takes_more_and_neither_waits_long(changes):
    job = training(**changes)
    found = by_parts(job, mixed("4xh100+4xl40s"))
    fast, slow = found.answers
    assert sum(found.shares) == pytest.approx(1.0) and min(found.shares) > 0
    if changes:  # kernels of a small model are launched, not computed
        assert found.shares[0] > 2 * found.shares[1]
    assert max(fast.step_s[0], slow.step_s[0]) < 1.5 * min(fast.step_s[0], slow.step_s[0])
    whole = sum(each.training.batch_tokens for each in found.answers)
    assert whole == pytest.approx(job.batch_tokens, rel=0.01)
    assert found.step_s.low <= found.step_s.value <= found.step_s.high


def test_rows_of_one_length_are_dealt_whole_and_all_of_them():
    found = by_parts(training(**FIXED | {"method": "full"}), mixed("4xh100+2xa100-80g+2xl40s"))
    rows = [each.training.batch_tokens / 512 for each in found.answers]
    assert sum(rows) == 64 and all(each == int(each) >= 1 for each in rows)


def test_parts_are_faster_than_one_plan_that_waits_for_the_slowest():
    job, cluster = training(**LARGE), mixed("4xh100+4xl40s")
    one, found = answer(job, cluster), by_parts(job, cluster)
    assert found.step_s.value < 0.7 * one.step_s[0]
    first = found.describe(one)[0]
    assert "times as fast as one plan for all" in first and "[simulated only]" in first
    assert len(found.describe()) == 3 and json.dumps(found.to_dict(), allow_nan=False)


def test_gradients_take_their_bytes_over_the_slowest_link(tmp_path):
    path = tmp_path / "sites.toml"
    path.write_text(SITES)
    job = training(**FIXED | {"method": "full"})
    found = by_parts(job, mixed(str(path)))
    # 2 parts: each sends half of the float32 gradients twice at 1 GB/s, and waits 10 ms and the
    # network's 15 us twice
    by_hand_s = 4 * job.shape.num_params / 1e9 + 2 * (0.010 + 15e-6)
    assert found.sync_s == pytest.approx(by_hand_s)
    assert found.step_s.value == pytest.approx(
        max(each.step_s[0] for each in found.answers) + by_hand_s
    )
    assert found.shares == [0.5, 0.5]
    assert found.answers[0].asked.text == "2xh100 at paris"
    assert found.hours.value == pytest.approx(10 * found.step_s.value / 3600)
    assert found.dollars.value == pytest.approx(found.hours.value * 4 * 6.88)


def test_adapters_are_all_that_travels_between_parts():
    job = training(**FIXED)
    assert num_trained(job) == sum(
        each.num_elements for each in lora_tensors(CONFIG, LORA).values()
    )
    whole = by_parts(training(**FIXED | {"method": "full"}), mixed("2xh100+2xl40s"))
    assert by_parts(job, mixed("2xh100+2xl40s")).sync_s < whole.sync_s


def test_a_part_that_cannot_hold_the_model_is_left_out_and_said():
    job = training(**LARGE | {"method": "full", "lora": None})
    found = by_parts(job, mixed("8xh100+8xh200+1xrtx2080"))
    assert found.left_out == ["1xrtx2080"] and len(found.answers) == 2
    assert found.describe()[-1] == "1xrtx2080: cannot hold the model, left out"
    assert found.usd_per_h == pytest.approx(8 * (6.88 + 7.912))  # what it costs is not counted
    assert by_parts(job, mixed("8xh100+1xrtx2080")) is None


@given(shares=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8), more=st.integers(0, 10_000))
def test_whole_shares_sum_to_all_and_nobody_is_left_without(shares, more):
    total = len(shares) + more
    counts = whole_shares(shares, total)
    assert sum(counts) == total and min(counts) >= 1
    for share, count in zip(shares, counts):
        assert abs(count - 1 - more * share / sum(shares)) <= 1 + 1e-6


def test_a_batch_of_fewer_rows_than_parts_is_not_shared():
    job = training(**FIXED | {"batch_tokens": 2 * 512})
    assert by_parts(job, mixed("1xh100+1xl40s+1xmi300x")) is None
    assert by_parts(job, mixed("1xh100+1xl40s")).shares == [0.5, 0.5]
