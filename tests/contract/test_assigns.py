"""Every registered Assign: each item gets a bin, the same one each time, and nothing else changes.

The contract is also held against two assignments written down here, one that keeps it and one that
does not, so that it is tested whether or not a policy of the shape exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.policy import Assign, WorkItem
from tests.contract.scenarios import make, of_shape


@dataclass(frozen=True, kw_only=True)
class InTurn(Assign):
    """Bins in turn; the state is the next one (None at first)."""

    def assign(self, state: Any, items: Sequence[WorkItem], num_bins: int) -> tuple[Any, list[int]]:
        first = state or 0
        return first + len(items), [(first + at) % num_bins for at in range(len(items))]


@dataclass(frozen=True, kw_only=True)
class Forgetful(Assign):
    """Loses the last item."""

    def assign(self, state: Any, items: Sequence[WorkItem], num_bins: int) -> tuple[Any, list[int]]:
        return state, [0 for _ in items[1:]]


POLICIES = [InTurn(), *(make(entry) for entry in of_shape("assign"))]
items_of = st.lists(st.integers(0, 4096), max_size=9).map(
    lambda lengths: [
        WorkItem(id_, length, flops=2.0 * length, num_bytes=4.0 * length)
        for id_, length in enumerate(lengths)
    ]
)


def assign_batches(
    policy: Assign, batches: Sequence[Sequence[WorkItem]], num_bins: int
) -> list[list[int]]:
    """The bins of several batches, one after the other, held to what every world relies on."""
    state, out = None, []
    for items in batches:
        before = deepcopy((state, items))
        after, bins = policy.assign(state, items, num_bins)
        assert (state, items) == before, "assign returns a new state and changes no argument"
        assert len(bins) == len(items) and all(0 <= each < num_bins for each in bins)
        state = after
        out.append(bins)
    return out


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@settings(max_examples=40, deadline=None)
@given(batches=st.lists(items_of, max_size=4), num_bins=st.integers(1, 5))
def test_every_item_gets_a_bin_and_the_same_each_time(policy: Assign, batches, num_bins):
    first = assign_batches(policy, batches, num_bins)
    assert first == assign_batches(policy, batches, num_bins)


def test_an_item_without_a_bin_is_found():
    with pytest.raises(AssertionError):
        assign_batches(Forgetful(), [[WorkItem(0, 7)]], 2)
