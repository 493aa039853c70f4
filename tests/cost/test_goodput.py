"""Goodput: Daly's formulas against hand values, a search and a game of chance; what rents cost."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost.bars import Bar
from phalanx.cost.energy import energy_of
from phalanx.cost.goodput import Failures, best_interval_s, goodput_frac, run_costs
from phalanx.cost.money import rentals
from phalanx.errors import JobError
from phalanx.hardware import Cluster, parse_cluster, read_machine

times = st.floats(1.0, 1e7)


def test_the_first_term_is_young_s_square_root():
    # D = 1 s, M = 20,000 s: sqrt(2 * 20000) = 200, times 1 + sqrt(1/40000)/3 + 1/360000, less 1
    expected = 200.0 * (1 + 0.005 / 3 + 1 / 360_000) - 1.0
    assert best_interval_s(20_000.0, 1.0) == pytest.approx(expected)
    assert best_interval_s(100.0, 200.0) == 100.0  # D >= 2 M


def test_goodput_by_hand():
    # M = 1000 s, no cost but lost work, t = 100 s: 0.1 / (exp(0.1) - 1)
    assert goodput_frac(1000.0, 0.0, 0.0, 100.0) == pytest.approx(0.1 / math.expm1(0.1))
    # a restart as long as M costs a factor e
    whole, half = (goodput_frac(1000.0, 5.0, restart, 100.0) for restart in (0.0, 1000.0))
    assert whole / half == pytest.approx(math.e)
    assert goodput_frac(1.0, 1000.0, 0.0, 100.0) == 0.0


@given(mtbf_s=times, checkpoint_s=st.floats(0.01, 1e5))
def test_no_other_interval_is_better_by_a_percent(mtbf_s, checkpoint_s):
    if checkpoint_s > mtbf_s / 2:
        return  # Daly's series is one for short checkpoints
    chosen = goodput_frac(mtbf_s, checkpoint_s, 0.0, best_interval_s(mtbf_s, checkpoint_s))
    best = max(
        goodput_frac(mtbf_s, checkpoint_s, 0.0, mtbf_s * 10 ** (step / 20))
        for step in range(-120, 40)
    )
    assert chosen >= 0.99 * best


@pytest.mark.parametrize(
    ("mtbf_s", "stop_s", "restart_s", "interval_s"),
    [(1000.0, 10.0, 60.0, 150.0), (500.0, 50.0, 100.0, 300.0)],
)
def test_the_formula_is_the_mean_of_a_game_of_chance(mtbf_s, stop_s, restart_s, interval_s):
    dice, clock, wins = random.Random(7), 0.0, 20_000

    def until_up(clock):
        while (fail := dice.expovariate(1 / mtbf_s)) < restart_s:  # fails while it restarts
            clock += fail
        return clock + restart_s

    for _ in range(wins):
        while (fail := dice.expovariate(1 / mtbf_s)) < interval_s + stop_s:
            clock = until_up(clock + fail)
        clock += interval_s + stop_s
    measured = wins * interval_s / clock
    assert goodput_frac(mtbf_s, stop_s, restart_s, interval_s) == pytest.approx(measured, rel=0.03)


@given(mtbf_s=times, stop_s=times, restart_s=times, interval_s=times)
def test_goodput_is_a_share_and_worse_with_every_cost(mtbf_s, stop_s, restart_s, interval_s):
    frac = goodput_frac(mtbf_s, stop_s, restart_s, interval_s)
    assert 0.0 <= frac < 1.0
    assert goodput_frac(2 * mtbf_s, stop_s, restart_s, interval_s) >= frac
    assert goodput_frac(mtbf_s, 2 * stop_s, restart_s, interval_s) <= frac
    assert goodput_frac(mtbf_s, stop_s, 2 * restart_s, interval_s) <= frac


def test_llama_3_is_interrupted_as_often_as_it_was_and_trains_nine_tenths_of_the_time():
    failures = Failures()
    hours = failures.job_mtbf_s(16384, "on demand").value / 3600
    assert 54 * 24 / hours == pytest.approx(419)
    cost = run_costs(
        parse_cluster("16384xh100"), Bar(1000.0, 950.0, 1050.0), checkpoint_bytes=405.9e9 * 14
    )[0]
    assert cost.goodput_frac.low < 0.90 < cost.goodput_frac.value < 0.95  # "over 90 %"


def test_servers_of_a_thousand_fail_as_often_as_published():
    # FT-HSDP: 2.3 interruptions of 1000 servers in a day; Llama 3's rate is 3.8
    failures = Failures()
    assert 86400 / failures.job_mtbf_s(8000, "on demand").high == pytest.approx(2.3)
    assert 86400 / failures.job_mtbf_s(8000, "on demand").value == pytest.approx(3.79, abs=0.01)


def test_every_price_of_a_machine_is_a_way_to_rent_it():
    found = rentals(parse_cluster("8xh100"))
    assert [(each.terms, each.usd_per_h) for each in found] == [
        ("on demand", 8 * 6.88), ("on demand", 8 * 2.95), ("spot", 8 * 1.25),
    ]  # fmt: skip
    assert rentals(parse_cluster("8xgb200"))[0].terms == "reserved"
    assert rentals(parse_cluster("8xh20")) == []


def test_spot_is_interrupted_more_and_its_hours_are_dearer_in_time():
    on_demand, _, spot = run_costs(
        parse_cluster("64xh100"), Bar(100.0, 90.0, 110.0), checkpoint_bytes=1e12
    )
    assert spot.interruptions > on_demand.interruptions
    assert spot.hours.value > on_demand.hours.value > 100.0
    assert spot.hours.low <= spot.hours.value <= spot.hours.high
    assert spot.usd.value == pytest.approx(spot.hours.value * 64 * 1.25)
    assert "spot: 9" in spot.describe() and spot.to_dict()["usd"][0] == spot.usd.value
    # 8 instances at 17.5 % a month beside 64 devices at 50,677 h
    rate = 8 * 0.175 / 720 + 64 / 50677.0
    assert spot.interruptions == pytest.approx(spot.hours.value * rate, rel=1e-4)


def test_a_run_that_hardly_ever_trains_has_no_end_and_json_says_none():
    spot = run_costs(parse_cluster("16384xh100"), Bar(1000.0, 900.0, 1100.0), checkpoint_bytes=6e12)
    hours = spot[-1].hours
    assert hours.value < hours.high == math.inf
    assert spot[-1].to_dict()["hours"][2] is None and spot[-1].to_dict()["usd"][2] is None


@given(
    devices=st.integers(1, 100_000),
    name=st.sampled_from(["h100", "v5e", "mi300x", "a100-pcie"]),
    hours=st.floats(0.01, 1e4),
    checkpoint_bytes=st.floats(0, 1e13),
)
def test_bars_hold_their_value_and_more_devices_fail_more(devices, name, hours, checkpoint_bytes):
    cluster = Cluster(read_machine(name), devices)
    given_hours = Bar(hours, 0.9 * hours, 1.2 * hours)
    for cost in run_costs(cluster, given_hours, checkpoint_bytes=checkpoint_bytes):
        for bar in (cost.goodput_frac, cost.hours, cost.usd):
            assert bar.low <= bar.value <= bar.high
        assert cost.hours.value >= hours and 0 <= cost.goodput_frac.low
    more = Failures().job_mtbf_s(2 * devices, "spot")
    assert more.value < Failures().job_mtbf_s(devices, "spot").value or devices < 8


def test_energy_is_power_times_time_in_the_share_that_is_drawn():
    found = energy_of(parse_cluster("8xh100"), Bar(10.0, 9.0, 12.0), "train")
    assert found is not None
    assert found.devices_kwh.value == pytest.approx(8 * 0.7 * 10 * 0.85)
    assert found.devices_kwh.high == pytest.approx(8 * 0.7 * 12)
    assert found.hall_kwh.high == pytest.approx(8 * 1.73 * 12)
    assert energy_of(parse_cluster("8xv5e"), Bar(1.0, 1.0, 1.0), "serve") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"restart_s": Bar(600.0, 700.0, 900.0)},
        {"restart_s": Bar(math.nan, 0.0, 1.0)},
        {"device_mtbf_s": Bar(1.0, 0.0, 2.0)},
        {"spot_wait_s": Bar(1.0, 0.0, math.inf)},
        {"checkpoint_bytes_per_s": 0.0},
        {"checkpoint_bytes_per_s": math.nan},
    ],
    ids=str,
)
def test_rates_that_contradict_themselves_are_refused(changes):
    with pytest.raises(JobError, match=r"failures\."):
        replace(Failures(), **changes)
