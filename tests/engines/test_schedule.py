"""Learning rates against their formulas, and at the edges."""

from __future__ import annotations

from itertools import pairwise
from math import cos, pi, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.engines.schedule import SCHEDULES, learning_rate
from phalanx.errors import JobError


def rates(schedule, num_steps, **settings):
    return [
        learning_rate(step, schedule=schedule, num_steps=num_steps, **settings)
        for step in range(num_steps)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_rises_to_the_peak_in_equal_steps(schedule):
    found = rates(schedule, 13, peak=2.0, warmup_steps=3)
    assert found[:4] == [0.5, 1.0, 1.5, 2.0]


def test_cosine_has_fallen_halfway_in_the_middle():
    found = rates("cosine", 13, peak=2.0, warmup_steps=3, final_frac=0.1)
    assert found[8] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert found[12] == pytest.approx(2.0 * (0.1 + 0.45 * (1.0 + cos(0.9 * pi))))
    assert all(a > b for a, b in pairwise(found[3:])) and found[-1] > 0.2


def test_linear_falls_in_equal_steps():
    found = rates("linear", 13, peak=2.0, warmup_steps=3, final_frac=0.5)
    assert found[3:] == pytest.approx([2.0 - 0.1 * at for at in range(10)])


def test_constant_stays_at_the_peak():
    assert rates("constant", 9, peak=3.0, warmup_steps=2, final_frac=0.0)[2:] == [3.0] * 7


def test_wsd_stays_at_the_peak_and_decays_over_its_last_part():
    found = rates("wsd", 20, peak=1.0, warmup_steps=2, final_frac=0.2, decay_frac=0.25)
    assert found[2:16] == [1.0] * 14
    assert found[16:] == pytest.approx([1.0 - 0.8 * sqrt(at / 5) for at in range(1, 5)])


def test_wsd_decay_longer_than_what_the_warm_up_leaves_starts_after_it():
    found = rates("wsd", 6, peak=1.0, warmup_steps=4, final_frac=0.0, decay_frac=1.0)
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0 - sqrt(0.5)])


def test_wsd_without_decay_is_constant():
    settings = {"peak": 1.0, "warmup_steps": 1, "final_frac": 0.3}
    found = rates("wsd", 7, decay_frac=0.0, **settings)
    assert found == rates("constant", 7, **settings)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_step_without_warm_up_is_at_the_peak(schedule):
    assert rates(schedule, 1, peak=4.0, warmup_steps=0) == [4.0]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup_steps", [4, 7])
def test_warm_up_as_long_as_the_run_rises_throughout(schedule, warmup_steps):
    found = rates(schedule, 4, peak=1.0, warmup_steps=warmup_steps)
    assert found == [(step + 1) / (warmup_steps + 1) for step in range(4)]


@given(
    schedule=st.sampled_from(SCHEDULES),
    num_steps=st.integers(1, 300),
    warmup_steps=st.integers(0, 400),
    final_frac=st.floats(0.0, 1.0),
    decay_frac=st.floats(0.0, 1.0),
)
def test_rates_rise_once_and_fall_once_between_floor_and_peak(
    schedule, num_steps, warmup_steps, final_frac, decay_frac
):
    found = rates(
        schedule,
        num_steps,
        peak=1.0,
        warmup_steps=warmup_steps,
        final_frac=final_frac,
        decay_frac=decay_frac,
    )
    assert all(0.0 < rate <= 1.0 for rate in found)
    after = found[warmup_steps:]
    assert all(a >= b - 1e-12 for a, b in pairwise(after))
    assert all(rate >= final_frac - 1e-12 for rate in after)
    assert not after or after[0] == pytest.approx(1.0)


def test_unknown_schedule_is_refused_with_the_nearest():
    with pytest.raises(JobError, match=r"train\.schedule = cosin.*cosine"):
        learning_rate(0, schedule="cosin", peak=1.0, warmup_steps=0, num_steps=1)
