"""Megatron-LM and Llama 3 by formula and on the real order: gates hold, and can fail."""

from __future__ import annotations

import pytest

from phalanx import systems
from phalanx.cost.model_shape import shape_of
from phalanx.errors import PlanError
from phalanx.hardware import parse_cluster
from phalanx.models.named import named_model
from phalanx.planner.sizing import four_axes
from phalanx.systems.reproductions import llama3_parallelism, megatron_lm

TOKENS = 16 * 2**20


@pytest.mark.parametrize(("slug", "least"), [("megatron-lm", 25), ("llama3-parallelism", 18)])
def test_every_gate_holds(slug, least):
    report = systems.reproduce(slug)
    report.require_gates()
    assert sum(row.passed is True for row in report.rows) >= least


@pytest.mark.parametrize("slug", ["megatron-lm", "llama3-parallelism"])
def test_published_rows_are_the_files_numbers_or_ratios_of_two(slug):
    numbers = [row.number for row in systems.published(slug) if row.number is not None]
    close = [n * scale for n in numbers for scale in (1.0, 0.01)]
    for row in systems.reproduce(slug).rows:
        if row.source == "published" and "/" not in row.quantity:
            assert any(row.value == pytest.approx(each, rel=1e-12) for each in close), row


def test_a_peak_of_another_device_misses_the_utilisation(monkeypatch):
    monkeypatch.setattr(megatron_lm, "PEAK_FLOPS", 300e12)
    missed = systems.reproduce("megatron-lm").missed
    assert missed and all(row.quantity.startswith(("MFU", "HFU")) for row in missed)


def test_slower_messages_miss_the_idle_shares(monkeypatch):
    monkeypatch.setattr(llama3_parallelism, "_FORWARD_S", 1.5)
    assert systems.reproduce("llama3-parallelism").missed


def sized(seq, step_tokens=TOKENS, cluster="16384xh100"):
    shape = shape_of(named_model("llama-3.1-405b").config)
    return four_axes(shape, parse_cluster(cluster), step_tokens=step_tokens, seq_tokens=seq)


def test_axes_multiply_to_the_devices_and_every_data_rank_feeds_its_pipeline():
    for seq in (8192, 32_768, 131_072):
        found = sized(seq)
        assert found.tensor * found.context * found.pipeline * found.data == 16_384
        assert TOKENS // seq >= found.pipeline * found.data
        assert len(found.reasons) == 4


def test_a_tensor_group_stays_in_a_domain_that_is_no_power_of_two():
    found = sized(131_072, cluster="16384xgb200")
    assert (found.tensor, found.context) == (64, 2)


def test_a_step_without_a_sequence_and_a_model_that_no_pipeline_holds_are_refused():
    with pytest.raises(PlanError, match="no sequence"):
        sized(8192, step_tokens=4096)
    with pytest.raises(PlanError, match="no pipeline fits"):
        sized(8192, step_tokens=8192 * 64, cluster="8xl4")
