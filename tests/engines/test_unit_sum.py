"""Gradients are counted: a unit acts when all are there, in whatever order they came."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from phalanx.engines.unit_sum import UnitGradients
from phalanx.errors import WorldError


class Noted(UnitGradients):
    """Writes down what it would send."""

    def __init__(self, parameters, dtype=None, *, every_round: bool = False) -> None:
        super().__init__(lambda: parameters, dtype, every_round=every_round)
        self.sent: list[list[float]] = []
        self.ended = 0

    def _start(self) -> None:
        self.sent.append([float(self.take_grad(each)) for each in self.parameters])

    def _end(self) -> None:
        self.ended += 1


def weights(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in range(count)]


@settings(max_examples=50, deadline=None)
@given(data=st.data(), num_items=st.integers(1, 4), extra=st.integers(1, 3))
def test_a_unit_is_sent_once_and_whole_in_any_order_of_gradients(data, num_items, extra):
    """Also where a weight has several uses in each micro-batch (a tied embedding)."""
    parameters = weights(3)
    unit = Noted(parameters)
    uses = {parameters[1]: extra}
    unit.begin_step(num_items, uses)
    passes = [at for at in range(3) for _ in range(num_items * (extra if at == 1 else 1))]
    order = data.draw(st.permutations(passes))
    for done, at in enumerate(order):
        assert not unit.sent, f"sent after {done} of {len(order)}"
        (parameters[at] * (at + 1)).backward()
    unit.finish()
    assert unit.sent == [[num_items * 1.0, num_items * extra * 2.0, num_items * 3.0]]
    assert unit.ended == 1


@pytest.mark.parametrize(
    ("num_items", "round_items", "rounds"),
    [(5, 1, [1, 1, 1, 1, 1]), (5, 2, [2, 2, 1]), (4, 2, [2, 2]), (3, 8, [3])],
)
def test_rounds_are_sent_as_they_end(num_items, round_items, rounds):
    (weight,) = weights(1)
    unit = Noted([weight], every_round=True)
    unit.begin_step(num_items, {}, round_items)
    for _ in range(num_items):
        (weight * 1.0).backward()
    unit.finish()
    assert unit.sent == [[float(count)] for count in rounds]


def test_a_weight_that_two_stages_share_is_sent_once():
    """The rounds of its two stages overlap, so no part of its sum is a round's."""
    weight, other = weights(2)
    unit = Noted([weight, other], every_round=True)
    unit.begin_step(3, {weight: 2})
    for _ in range(3):
        (weight + other).backward()
    assert not unit.sent
    for _ in range(3):
        (weight * 1.0).backward()
    unit.finish()
    assert unit.sent == [[6.0, 3.0]]


def test_gradients_past_autograds_hooks_are_noted():
    (weight,) = weights(1)
    unit = Noted([weight])
    unit.begin_step(2, {})
    (weight * 2.0).backward()
    weight.grad += 5.0
    unit.note(weight)
    unit.finish()
    assert unit.sent == [[7.0]]


def test_what_is_missing_or_too_much_is_an_error():
    first, second = weights(2)
    unit = Noted([first, second])
    unit.begin_step(1, {})
    (first * 1.0).backward()
    told = r"train.loss = \[\(\)\]: of trained weights got no gradient.*a loss must use them.*fsdp"
    with pytest.raises(WorldError, match=told) as info:
        unit.finish()
    assert info.value.code == "train/callback"
    with pytest.raises(AssertionError, match="a gradient more"):
        unit.note(first)


def test_without_a_step_nothing_counts():
    (weight,) = weights(1)
    unit = Noted([weight])
    unit.begin_step(1, {})
    (weight * 1.0).backward()
    unit.finish()
    (weight * 4.0).backward()  # of somebody who looks at gradients between steps
    assert unit.sent == [[1.0]] and weight.grad == 4.0


def test_frozen_units_send_nothing():
    unit = Noted([])
    unit.begin_step(2, {})
    unit.finish()
    assert not unit.sent and not unit.ended
