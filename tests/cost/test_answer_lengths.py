"""Lengths of answers: the law against drawn numbers, hand values and its own limits."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost.answer_lengths import SPREAD, AnswerLengths
from phalanx.errors import JobError


@pytest.mark.parametrize(("mean", "limit"), [(800.0, 16384.0), (5500.0, 8000.0), (500.0, 600.0)])
def test_drawn_answers_have_the_mean_the_tail_and_the_longest(mean, limit):
    law, dice = AnswerLengths(mean, limit), random.Random(3)
    drawn = [min(dice.lognormvariate(law.location, SPREAD), limit) for _ in range(40_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.02)
    for at in (0.2 * mean, mean, 0.9 * limit):
        share = sum(each > at for each in drawn) / len(drawn)
        assert float(law.alive_after(np.array([at]))[0]) == pytest.approx(share, abs=0.01)
    longest = sorted(max(drawn[at : at + 64]) for at in range(0, 40_000, 64))
    assert law.longest_of(64) == pytest.approx(longest[len(longest) // 2], rel=0.1)


def test_the_longest_of_a_batch_is_thirty_times_the_median_as_published():
    # RollPacker: the longest of 1,024 answers is 25 to 32 times the median
    law = AnswerLengths(800.0, 1e9)
    assert 25 < law.longest_of(1024) / math.exp(law.location) < 32


def test_without_a_limit_the_mean_is_the_textbook_s():
    law = AnswerLengths(1000.0, 1e12)
    assert law.location == pytest.approx(math.log(1000.0) - SPREAD**2 / 2, abs=1e-6)


@pytest.mark.parametrize("law", [AnswerLengths(100.0, 100.0), AnswerLengths(100.0, 500.0, 0.0)])
def test_answers_that_are_all_alike_end_together(law):
    assert law.longest_of(1000) == 100.0
    assert law.alive_after(np.array([99.0, 100.0])).tolist() == [1.0, 0.0]


@given(
    mean=st.floats(1.0, 1e5), over=st.floats(1.0, 1e4), spread=st.floats(0.0, 3.0),
    count=st.integers(1, 10**6),
)  # fmt: skip
def test_more_answers_have_a_longer_longest_and_none_is_beyond_the_limit(mean, over, spread, count):
    law = AnswerLengths(mean, mean * over, spread)
    assert 0 < law.longest_of(count) <= law.longest_of(2 * count) <= law.limit_tokens
    at = np.linspace(0.0, law.limit_tokens, 20)
    alive = law.alive_after(at)
    assert alive[0] == pytest.approx(1.0) and alive[-1] == 0.0
    assert (np.diff(alive) <= 0).all()


@pytest.mark.parametrize(
    ("mean", "limit", "spread"),
    [(0.0, 10.0, 1.0), (11.0, 10.0, 1.0), (math.nan, 10.0, 1.0), (5.0, math.inf, 1.0),
     (5.0, 10.0, -1.0), (5.0, 10.0, math.nan), (5.0, 10.0, 9.0)],
)  # fmt: skip
def test_lengths_that_cannot_be_are_refused(mean, limit, spread):
    with pytest.raises(JobError):
        AnswerLengths(mean, limit, spread)
