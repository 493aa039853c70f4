"""Gemma 4 on TPU and GPU: gates hold and can fail; what contradicts itself gates nothing."""

from __future__ import annotations

from statistics import mean

import pytest

from phalanx import systems
from phalanx.cost.money import million_tokens_usd, run_usd, train_and_serve_usd
from phalanx.report import Report
from phalanx.systems.reproductions import _gemma4_rows as rows
from phalanx.systems.reproductions import _gemma4_serving as serving
from phalanx.systems.reproductions import gemma4_tpu
from phalanx.systems.reproductions._gemma4_models import config_of
from phalanx.systems.reproductions._gemma4_serving import Load, Servers, play, solved, sweep

CONFIG = config_of("31B")


@pytest.fixture(scope="module")
def report():
    return systems.reproduce("gemma4-tpu")


def test_every_gate_holds(report):
    report.require_gates()
    assert sum(row.passed is True for row in report.rows) >= 50


def test_every_published_value_is_one_of_the_file_or_made_of_two(report):
    numbers = [row.number for row in systems.published("gemma4-tpu") if row.number is not None]
    close = [n * scale for n in numbers for scale in (1.0, 1e-3)]
    for row in report.rows:
        if row.source == "published" and "two published rows" not in row.note:
            assert any(row.value == pytest.approx(each, rel=1e-12) for each in close), row


def test_rows_against_physics_or_each_other_are_shown_with_a_reason_and_gate_nothing(report):
    for where in ("8192/512", "15360/512"):
        found = [row for row in report.rows if where in row.quantity]
        assert {row.source for row in found} >= {"published"} and len(found) >= 4
        assert all(row.passed is None for row in found)
    assert "482" in report.notes["8192/512, not gated"]
    floor = [r.value for r in report.rows if "15360" in r.quantity and r.source == "formula"]
    said = [r.value for r in report.rows if "15360" in r.quantity and r.source == "published"]
    assert all(least > published for least, published in zip(floor, said))


def test_every_simulated_row_says_what_it_takes_as_given_or_that_it_gates_nothing(report):
    for row in report.rows:
        if row.source == "simulated" and "v6e-8" not in row.quantity:
            assert "of the peak" in row.note or "not gated" in row.note, row


# ---- gates can fail ------------------------------------------------------------------------------


def test_a_cache_without_an_end_misses_the_knee(monkeypatch):
    monkeypatch.setattr(rows, "_kv_tokens", lambda servers, config: 10**7)
    report = Report("knee")
    rows._knee(report, CONFIG)
    missed = [row.quantity for row in report.missed]
    assert "output tokens per second, 256 x 1024/1024 / 128 x 512/512, v6e-8" in missed


def test_prompts_that_cost_nothing_miss_the_gap(monkeypatch):
    monkeypatch.setattr(rows, "_FRACS", (0.5,))
    monkeypatch.setattr(serving, "layer_params", lambda config: 1)
    report = Report("long prompts")
    rows._long_prompts(report, CONFIG)
    assert any("GPU / TPU" in row.quantity for row in report.missed)


def test_another_price_or_another_count_misses_a_gate(monkeypatch):
    monkeypatch.setattr(gemma4_tpu, "million_tokens_usd", lambda *args: run_usd(*args))
    monkeypatch.setattr(gemma4_tpu, "kv_token_bytes", lambda config, kind=None: 901_121)
    monkeypatch.setattr(gemma4_tpu, "adapter_params", lambda config: (489.7e6, 472.5e6, 472.5e6))
    report = Report("arithmetic")
    gemma4_tpu._money(report)
    gemma4_tpu._cache(report, CONFIG)
    gemma4_tpu._sizes(report, CONFIG)
    words = " ".join(row.quantity for row in report.missed)
    for word in ("million output tokens", "every layer", "recipe's pattern"):
        assert word in words


# ---- the simulation's own laws -------------------------------------------------------------------

SERVERS = Servers(
    hardware="x", num_chips=2, flops_per_s=2e15, bytes_per_s=6e12, kv_itemsize=2, step_s=0.02
)


def test_rates_that_are_not_played_could_not_be_the_best(monkeypatch):
    monkeypatch.setattr(serving, "_NUM_PROMPTS", 7)
    found = sweep(SERVERS, CONFIG, 900, 60, 0.5)
    cost, load = SERVERS.cost(CONFIG, 0.5), Load(7, 900, 60)
    best = max(
        mean(play(cost, load, rate, seed).tokens_per_s for seed in serving.SEEDS)
        for rate in serving.RATES
    )
    assert found.peak_tokens_per_s == pytest.approx(best, rel=1e-12)
    at_four = [play(cost, load, 4.0, seed).ttft_s for seed in serving.SEEDS]
    assert found.ttft_s == pytest.approx(mean(at_four), rel=1e-12)


def test_a_lone_request_has_the_times_of_its_formula():
    cost, load = SERVERS.cost(CONFIG, 0.5), Load(1, 3000, 3)
    seen = play(cost, load)
    prompt_s = 2 * 29.28805382e9 * 3000 / 1e15
    read_s = sum(819_200 * 1024 + 81_920 * n for n in (3000, 3001)) / 3.6e12
    assert seen.ttft_s == pytest.approx(prompt_s, rel=1e-9)
    assert seen.tpot_s == pytest.approx(0.02 + read_s / 2, rel=1e-9)
    assert seen.tokens_per_s == pytest.approx(3 / (prompt_s + 0.04 + read_s), rel=1e-9)


def test_a_solved_step_gives_the_tpot_that_it_was_solved_for():
    load = Load(9, 128, 40)
    found = solved(SERVERS, CONFIG, 0.5, load, 0.0187)
    assert play(found.cost(CONFIG, 0.5), load).tpot_s == pytest.approx(0.0187, rel=1e-9)
    assert found.step_s < 0.0187


def test_dollars_follow_from_hours_and_prices():
    assert run_usd(2.5, 4.0) == 10.0
    assert million_tokens_usd(36.0, 100.0) == pytest.approx(100.0)
    assert train_and_serve_usd(2.0, 3.0, 4.0, 5.0) == 26.0
