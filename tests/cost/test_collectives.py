"""Formulas of collectives: played step by step, and against one another."""

from __future__ import annotations

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.action import COLLECTIVES
from phalanx.cost.collectives import (
    ALGORITHMS,
    hierarchical_s,
    hierarchical_wire_bytes,
    ring_s,
    tree_s,
    wire_bytes,
)
from phalanx.errors import PlanError

members = st.integers(1, 33)
payloads = st.floats(0.0, 1e9)


def ring_played(collective: str, payload_bytes: float, n: int) -> tuple[int, float]:
    """Steps and bytes sent per member of a ring, counted chunk by chunk."""
    rounds = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}[collective]
    steps, sent = 0, 0.0
    for _ in range(rounds):
        for _ in range(n - 1):
            steps += 1
            sent += payload_bytes / n
    return steps, sent


@given(st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]), payloads, members)
def test_ring_equals_its_steps_played(collective: str, payload_bytes: float, n: int):
    steps, sent = ring_played(collective, payload_bytes, n)
    assert wire_bytes(collective, payload_bytes, n) == pytest.approx(sent)
    assert ring_s(collective, payload_bytes, n, 4.0, 0.5) == pytest.approx(steps * 0.5 + sent / 4.0)


@given(payloads, members)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(payload_bytes: float, n: int):
    for price in ALGORITHMS.values():
        parts = [price(c, payload_bytes, n, 3.0, 0.25) for c in ("reduce_scatter", "all_gather")]
        assert price("all_reduce", payload_bytes, n, 3.0, 0.25) == pytest.approx(sum(parts))
    parts = [wire_bytes(c, payload_bytes, n) for c in ("reduce_scatter", "all_gather")]
    assert wire_bytes("all_reduce", payload_bytes, n) == pytest.approx(sum(parts))


@given(st.sampled_from(COLLECTIVES), payloads)
def test_one_member_costs_nothing(collective: str, payload_bytes: float):
    assert wire_bytes(collective, payload_bytes, 1) == 0.0
    for price in ALGORITHMS.values():
        assert price(collective, payload_bytes, 1, 3.0, 0.25) == 0.0


@given(st.sampled_from(COLLECTIVES), payloads, st.integers(2, 33))
def test_no_algorithm_beats_the_wire(collective: str, payload_bytes: float, n: int):
    for price in ALGORITHMS.values():
        wire_s = wire_bytes(collective, payload_bytes, n) / 3.0
        assert price(collective, payload_bytes, n, 3.0, 0.0) >= wire_s * (1 - 1e-12)


@given(
    st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]), payloads, st.integers(2, 33)
)
def test_trees_save_steps_and_no_bytes(collective: str, payload_bytes: float, n: int):
    ring, tree = (p(collective, payload_bytes, n, 3.0, 0.0) for p in (ring_s, tree_s))
    assert ring == pytest.approx(tree)
    rounds = 2 if collective == "all_reduce" else 1
    assert tree_s(collective, 0.0, n, 3.0, 1.0) == rounds * ceil(log2(n))
    assert ring_s(collective, 0.0, n, 3.0, 1.0) == rounds * (n - 1)


def test_known_values():
    assert wire_bytes("all_gather", 80.0, 8) == 70.0
    assert wire_bytes("all_reduce", 80.0, 8) == 140.0
    assert wire_bytes("all_to_all", 80.0, 8) == 70.0
    assert wire_bytes("barrier", 80.0, 8) == 0.0
    assert ring_s("broadcast", 80.0, 5, 10.0, 1.0) == 12.0
    assert tree_s("broadcast", 80.0, 5, 10.0, 1.0) == 3 * 9.0
    assert tree_s("all_to_all", 80.0, 8, 10.0, 1.0) == 3 * 5.0
    assert ring_s("barrier", 80.0, 9, 10.0, 1.0) == 4.0


def played_hierarchical(
    collective: str, payload: float, nodes: int, local: int
) -> tuple[float, float]:
    """Bytes sent by a member inside and between nodes, from who has to receive what.

    Reduce-scatter and all-gather are mirror images. For all-gather: first the `nodes` members of
    equal place in their node collect their P / n each, then the node collects P.
    """
    n = nodes * local
    between = (nodes - 1) * payload / n
    inside = (local - 1) * nodes * payload / n
    if collective == "all_reduce":
        return 2 * inside, 2 * between
    return inside, between


@given(
    st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
    payloads,
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_two_levels_send_what_has_to_be_received(collective, payload_bytes, nodes, local):
    found = hierarchical_wire_bytes(collective, payload_bytes, nodes, local)
    assert found == pytest.approx(played_hierarchical(collective, payload_bytes, nodes, local))
    assert sum(found) == pytest.approx(wire_bytes(collective, payload_bytes, nodes * local))


@given(st.sampled_from(COLLECTIVES), payloads, st.integers(1, 9), st.sampled_from(["ring", "tree"]))
def test_one_level_is_the_flat_formula(collective, payload_bytes, n, algorithm):
    rates = {"node_bytes_per_s": 8.0, "net_bytes_per_s": 2.0}
    rates |= {"node_latency_s": 0.5, "net_latency_s": 3.0, "algorithm": algorithm}
    flat = ALGORITHMS[algorithm]
    assert hierarchical_s(collective, payload_bytes, 1, n, **rates) == pytest.approx(
        flat(collective, payload_bytes, n, 8.0, 0.5)
    )
    assert hierarchical_s(collective, payload_bytes, n, 1, **rates) == pytest.approx(
        flat(collective, payload_bytes, n, 2.0, 3.0)
    )


def test_two_levels_keep_the_slow_network_for_one_share():
    """8 nodes of 8: the network carries an eighth of the tensor, not all of it."""
    rates = {"node_bytes_per_s": 8.0, "net_bytes_per_s": 1.0}
    rates |= {"node_latency_s": 0.0, "net_latency_s": 0.0}
    two_levels = hierarchical_s("all_reduce", 64.0, 8, 8, **rates)
    assert two_levels == 2 * 64 * 7 / 8 / 8 + 2 * 8 * 7 / 8
    assert two_levels < ring_s("all_reduce", 64.0, 64, 1.0, 0.0)


def test_an_unknown_kind_is_refused_with_near_ones():
    for call in (
        lambda: wire_bytes("allreduce", 1.0, 2),
        lambda: ring_s("allreduce", 1.0, 2, 1.0, 0.0),
        lambda: tree_s("allreduce", 1.0, 1, 1.0, 0.0),
    ):
        with pytest.raises(PlanError) as caught:
            call()
        assert "all_reduce" in caught.value.legal
