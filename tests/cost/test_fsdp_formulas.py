"""The closed formulas of sharded data parallelism against counting, and against one another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost import fsdp
from phalanx.cost.collectives import wire_bytes

UNITS = st.lists(st.integers(1, 10**9), min_size=1, max_size=9)


def counted_bytes(units, num_ranks, replicas, reshard, num_kept):
    """Bytes per rank (inside, between) by walking the step collective by collective."""
    inside = between = 0.0
    for at, size in enumerate(units):
        kept = at < num_kept
        gathers = 2 if reshard and not kept else 1
        inside += gathers * wire_bytes("all_gather", 2 * size, num_ranks)
        inside += wire_bytes("reduce_scatter", 2 * size, num_ranks)
        between += wire_bytes("all_reduce", 2 * size / num_ranks, replicas)
    return inside, between


@given(units=UNITS, degree=st.integers(1, 64), reshard=st.booleans(), num_kept=st.integers(0, 1))
def test_sharded_traffic_is_the_sum_over_collectives(units, degree, reshard, num_kept):
    kept = 2.0 * sum(units[:num_kept])
    formula = fsdp.sharded_traffic_bytes(2.0 * sum(units), degree, reshard=reshard, kept_bytes=kept)
    counted, _ = counted_bytes(units, degree, 1, reshard, num_kept)
    assert formula == pytest.approx(counted, rel=1e-12)


@given(units=UNITS, degree=st.integers(1, 16), replicas=st.integers(1, 64))
def test_hybrid_traffic_is_the_sum_over_collectives(units, degree, replicas):
    formula = fsdp.hybrid_traffic_bytes(2.0 * sum(units), degree * replicas, degree)
    assert formula == pytest.approx(counted_bytes(units, degree, replicas, True, 0), rel=1e-12)


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 511])
def test_full_sharding_costs_half_more_than_replication(num_ranks):
    plain = fsdp.replicated_traffic_bytes(7.0, num_ranks)
    assert fsdp.sharded_traffic_bytes(7.0, num_ranks) / plain == pytest.approx(1.5, rel=1e-15)
    kept = fsdp.sharded_traffic_bytes(7.0, num_ranks, reshard=False)
    assert kept / plain == pytest.approx(1.0, rel=1e-15)


def test_one_rank_sends_nothing():
    assert fsdp.replicated_traffic_bytes(7.0, 1) == fsdp.sharded_traffic_bytes(7.0, 1) == 0.0


def test_shards_over_all_ranks_are_full_sharding_and_over_one_replication():
    assert fsdp.hybrid_traffic_bytes(7.0, 16, 16) == (fsdp.sharded_traffic_bytes(7.0, 16), 0.0)
    assert fsdp.hybrid_traffic_bytes(7.0, 16, 1) == (0.0, fsdp.replicated_traffic_bytes(7.0, 16))


@pytest.mark.parametrize(("num_hosts", "gap_frac"), [(2, 0.5), (64, 0.02), (4096, 0.001)])
def test_printed_traffic_across_hosts_is_the_limit_of_many_hosts(num_hosts, gap_frac):
    ranks = 8 * num_hosts
    printed = fsdp.printed_cross_host_bytes(7.0, ranks, 8)
    _, exact = fsdp.hybrid_traffic_bytes(7.0, ranks, 8)
    assert 0 < 1 - exact / printed < gap_frac


def test_collectives_are_3n_minus_1_2n_and_n_more_with_replicas():
    assert sum(fsdp.num_collectives(7).values()) == 20
    assert sum(fsdp.num_collectives(7, reshard=False).values()) == 14
    assert sum(fsdp.num_collectives(7, replicas=2).values()) == 27
    assert sum(fsdp.num_collectives(7, num_kept=0).values()) == 21
    assert fsdp.num_collectives(1) == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 0}


@given(units=UNITS, degree=st.integers(1, 64), prefetch=st.integers(0, 3))
def test_memory_never_falls_below_shards_and_never_exceeds_no_reshard(units, degree, prefetch):
    sizes = {"full_bytes": 4, "low_bytes": 2}
    peak = fsdp.parameter_peak_bytes(units, degree, prefetch=prefetch, **sizes)
    kept = fsdp.parameter_peak_bytes(units, degree, reshard=False, **sizes)
    assert 4 * sum(units) / degree + 2 * max(units) <= peak <= kept


def test_memory_of_a_175b_model_over_128_ranks():
    units = [1_811_939_328] * 96  # 12 x 12288^2
    parameters = fsdp.parameter_peak_bytes(units, 128, full_bytes=4, low_bytes=2)
    assert parameters == 4 * sum(units) / 128 + 2 * units[0]
    state = fsdp.state_peak_bytes(units, 128, full_bytes=4, low_bytes=2, reduce_bytes=2)
    # fp32 parameters, gradients and two moments, the gathered unit and its gradient
    assert state == 16 * sum(units) / 128 + 4 * units[0]
