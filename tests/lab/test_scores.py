"""Scores against values worked out by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.lab.scores import (
    Estimate,
    call_score,
    error_score,
    macro_score,
    spearman,
    top_regret,
)

POSITIVE = st.floats(1e-3, 1e3)


def test_errors_bias_and_bars_of_four_rows():
    measured = [1.0, 2.0, 4.0, 10.0]
    predicted = [
        Estimate(1.1, 0.9, 1.3),  # +10 %, inside
        Estimate(1.0, 0.8, 1.2),  # -50 %, above the bar
        Estimate(4.0, 4.0, 4.0),  # exact, on its edges
        Estimate(13.0, 11.0, 15.0),  # +30 %, below the bar
    ]
    score = error_score(measured, predicted, [1.0, 2.0, 5.0, math.nan])
    assert score.rows == 4
    assert score.median == pytest.approx(0.2)  # of 0, 10, 30 and 50 %
    assert score.p90 == pytest.approx(0.44)  # 0.7 of the way from 30 to 50 %
    assert score.bias == pytest.approx(0.05)  # of -50, 0, 10 and 30 %
    assert score.in_bar == 0.5
    assert score.baseline == 0.0  # of 0, 0 and 25 %; NaN is not counted


def test_no_rows_have_no_score():
    assert error_score([], []) is None
    assert macro_score({}) is None


def test_a_baseline_that_knows_nothing_is_absent():
    assert error_score([1.0], [Estimate(1, 1, 1)], [math.nan]).baseline is None


def test_a_class_is_judged_by_the_median_source_not_by_the_largest():
    small = error_score([1.0], [Estimate(1.1, 0, 2)])
    middle = error_score([1.0] * 2, [Estimate(1.2, 0, 2)] * 2)
    large = error_score([1.0] * 97, [Estimate(3.0, 2, 4)] * 97)
    score = macro_score({"a": small, "b": middle, "c": large})
    assert score.median == pytest.approx(0.2) and score.worst == pytest.approx(2.0)
    assert score.rows == 100 and score.in_bar == pytest.approx(0.03)  # bars are of rows


def test_spearman_of_ties_by_hand():
    # ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: 4.5 / sqrt(4.5 * 5)
    assert spearman([1, 5, 5, 9], [1, 2, 3, 4]) == pytest.approx(math.sqrt(4.5 / 5))
    assert math.isnan(spearman([1, 1, 1], [1, 2, 3]))


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=20, unique=True))
def test_spearman_sees_order_alone(values):
    assert spearman(values, np.log(values)) == pytest.approx(1)
    assert spearman(values, [-value for value in values]) == pytest.approx(-1)


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=20))
def test_regret_is_at_least_one_and_one_for_the_truth(pairs):
    measured, predicted = zip(*pairs)
    assert top_regret(measured, predicted) >= 1
    assert top_regret(measured, measured) == 1


def test_calls_by_hand():
    score = call_score([True, True, False, False], [True, False, True, True])
    assert (score.called, score.true) == (2, 3)
    assert score.precision == 0.5 and score.recall == pytest.approx(1 / 3)
    assert call_score([True], [False]) is None
    assert math.isnan(call_score([False], [True]).precision)
