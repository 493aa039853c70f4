"""Which layouts exist, and why others do not."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.layout.tensor_split import tensor_legality
from phalanx.models.named import named_model
from phalanx.planner.candidates import (
    NO_CAST,
    NO_CUT,
    NO_WORK,
    fixed_mesh,
    layouts,
    row_choices,
)
from tests.planner.plan_cases import CONFIG


def found(number, *, config=CONFIG, domain=8, casts=False, whole=False, most=10**6, mesh=None):
    illegal = Counter()
    listed = list(
        layouts(
            config,
            number,
            domain,
            casts=casts,
            trains_all=whole,
            most_data_ranks=most,
            illegal=illegal,
            mesh=mesh,
        )
    )
    return listed, illegal


@given(
    number=st.integers(1, 300), domain=st.integers(1, 16), casts=st.booleans(), whole=st.booleans()
)
def test_every_layout_uses_all_devices_and_can_be_cut(number, domain, casts, whole):
    listed, _ = found(number, domain=domain, casts=casts, whole=whole)
    assert len(set(listed)) == len(listed)
    for each in listed:
        assert each.mesh.size == each.replicate * each.shard * each.tensor == number
        assert not tensor_legality(CONFIG, each.tensor).illegal
        axes = {spec.axis for spec in each.specs}
        assert axes <= set(each.mesh.names) and (each.is_sharded or not casts)
        assert each.splits_tokens <= (each.tensor > 1)


def test_layouts_of_eight_by_hand():
    listed, illegal = found(8)
    # tensor 1: replicas, shards given back, shards kept; 2 and 4 the same with and without split
    # tokens; 8: nothing is left to replicate or shard
    assert len(listed) == 3 + 2 * 3 + 2 * 3 + 2 and not illegal
    assert listed[0].describe() == "8 replicas"
    assert listed[-1].describe() == "tensor + sequence parallel over 8"


def test_gradients_of_a_whole_model_may_be_reduced_every_time():
    always = [each for each in found(8, whole=True)[0] if each.reduces_always]
    assert always and all(each.shard > 1 for each in always)
    (rule,) = {spec.rules()[1] for each in always for spec in each.specs[:1] if each.keeps_gathered}
    assert {each.when for each in rule.exchanges if each.of == "grads"} == {"always"}
    assert not any(each.reduces_always for each in found(8)[0])


def test_key_and_value_heads_may_be_replicated_but_query_heads_must_divide():
    gemma = named_model("gemma-4-31b").config  # 4 key and value heads in its full layers
    degrees = {each.tensor for each in found(64, config=gemma)[0]}
    assert degrees == {1, 2, 4, 8, 16, 32}
    assert set(found(64, config=gemma)[1]) == {NO_CUT}


def test_illegal_layouts_are_counted_by_reason():
    _, illegal = found(6, casts=True, most=2)
    # degrees 3 and 6 cut no 8 heads (three layouts each, twice for split tokens); 6 data ranks
    # (degree 1) and 3 (degree 2) are more than two documents
    assert illegal == {NO_CUT: 2 * (3 + 3), NO_WORK: 3 + 2 * 3}
    _, illegal = found(2, casts=True)
    assert illegal == {NO_CAST: 1 + 2}


def test_replicas_of_shards_stand_across_domains():
    listed, _ = found(32)
    hybrid = [each for each in listed if each.replicate > 1 and each.is_sharded]
    assert {(each.replicate, each.shard, each.tensor) for each in hybrid} == {
        *((4, 8, 1), (4, 4, 2), (4, 2, 4)),
    }


def test_a_mesh_that_the_job_names_is_kept_where_it_fits():
    assert fixed_mesh({"shard": 2}, 2) == {"shard": 2}
    assert fixed_mesh({"shard": 2}, 4) is None and fixed_mesh({"pp": 2}, 2) is None
    assert fixed_mesh({}, 1) is None
    listed, _ = found(8, mesh={"shard": 4, "tp": 2})
    assert {(each.shard, each.tensor) for each in listed} == {(4, 2)}


@pytest.mark.parametrize(
    ("least", "share", "fixed", "rows"),
    [
        (512, 4096.0, 0, [512, 1024, 2048, 4096]),
        (512, 700.0, 0, [512, 1024]),
        (512, 100.0, 0, [512]),
        (600, 4096.0, 777, [777]),
        (512, 1e9, 0, [512 * 2**at for at in range(8)]),
    ],
)
def test_rows_are_doubled_up_to_a_rank_s_share(least, share, fixed, rows):
    assert row_choices(least, share, fixed) == rows
