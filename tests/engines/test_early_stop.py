"""The best evaluation, and the end of patience."""

from __future__ import annotations

import json
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.engines.early_stop import BestLoss


def test_the_run_ends_after_so_many_evaluations_without_improvement():
    best = BestLoss(patience=2)
    said = [(best.note(at * 10, loss), best.should_stop) for at, loss in enumerate([3, 2, 2, 1, 1])]
    assert said == [(True, False), (True, False), (False, False), (True, False), (False, False)]
    assert not best.note(50, 5) and best.should_stop
    assert (best.loss, best.step) == (1, 30)
    assert best.reason == "2 evaluations without improvement on 1.0000 after step 30"


def test_without_patience_nothing_ends_the_run():
    best = BestLoss()
    for at in range(9):
        best.note(at, 1.0)
    assert not best.should_stop and best.num_worse == 8


@pytest.mark.parametrize("loss", [nan, inf])
def test_a_loss_without_a_value_is_never_the_best(loss):
    best = BestLoss(patience=2)
    assert not best.note(0, loss)
    assert best.note(1, 7.0) and not best.should_stop
    assert not best.note(2, loss) and not best.note(3, loss)
    assert best.should_stop and best.step == 1


@given(
    losses=st.lists(st.floats(0, 9) | st.just(nan), max_size=20),
    cut=st.integers(0, 20),
    patience=st.integers(0, 3),
)
def test_a_resumed_run_stops_where_an_uninterrupted_one_does(losses, cut, patience):
    whole, first = BestLoss(patience), BestLoss(patience)
    for step, loss in enumerate(losses[:cut]):
        whole.note(step, loss), first.note(step, loss)
    second = BestLoss(patience)
    second.restore(json.loads(json.dumps(first.state())))
    for step, loss in enumerate(losses[cut:], cut):
        assert second.note(step, loss) == whole.note(step, loss)
        assert second.should_stop == whole.should_stop
    assert vars(second) == vars(whole)
