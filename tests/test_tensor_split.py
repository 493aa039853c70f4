"""What a tensor degree cuts: legality with the way out, and key and value heads for every rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.layout.tensor_split import kv_heads_of, tensor_legality
from phalanx.models.spec import small_config
from tests.models.families import FAMILIES, tiny_config


@st.composite
def head_counts(draw) -> tuple[int, int, int]:
    """Query heads, key and value heads, degree: each divides the query heads."""
    num_kv_heads = draw(st.integers(1, 6))
    num_heads = num_kv_heads * draw(st.integers(1, 8))
    divisors = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
    return num_heads, num_kv_heads, draw(st.sampled_from(divisors))


@given(head_counts())
def test_each_query_head_attends_with_the_head_it_has_in_the_whole_model(counts):
    num_heads, num_kv_heads, degree = counts
    part = num_heads // degree
    for rank in range(degree):
        mine = kv_heads_of(num_heads, num_kv_heads, degree, rank)
        assert part % len(mine) == 0  # local attention groups query heads evenly
        for head in range(part):
            whole = (rank * part + head) // (num_heads // num_kv_heads)
            assert mine[head // (part // len(mine))] == whole


@given(head_counts())
def test_heads_that_the_degree_divides_are_cut_without_copies(counts):
    num_heads, num_kv_heads, degree = counts
    of_ranks = [kv_heads_of(num_heads, num_kv_heads, degree, rank) for rank in range(degree)]
    if num_kv_heads % degree == 0:
        assert sum(of_ranks, ()) == tuple(range(num_kv_heads))
    else:
        assert set(sum(of_ranks, ())) == set(range(num_kv_heads))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_cut_in_two(family):
    legality = tensor_legality(tiny_config(family), 2)
    assert not legality.illegal
    assert 2 in legality.nearest
    legality.require("plan.mesh.tp")


def test_more_ranks_than_key_and_value_heads_keep_the_projections_whole():
    config = tiny_config("gemma3")  # 4 query heads on 2 key and value heads
    assert "kv heads (full)" in tensor_legality(config, 2).cut
    legality = tensor_legality(config, 4)
    assert not legality.illegal and set(legality.whole) == {
        f"kv heads ({kind.name})" for kind in config.kinds
    }


def test_a_degree_that_cannot_be_cut_names_all_reasons_and_the_nearest_degrees():
    config = small_config(
        vocab_size=31, hidden_size=18, intermediate_size=20, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=6,
    )  # fmt: skip
    with pytest.raises(PlanError) as caught:
        tensor_legality(config, 3).require("plan.mesh.tp")
    text = str(caught.value)
    assert "plan.mesh.tp = 3" in text and "query heads (full): 4 cannot be cut" in text
    assert "feed-forward width 20" in text and "2, 4" in text.replace("4, 2", "2, 4")


def test_a_vocabulary_that_leaves_a_rank_without_tokens_is_illegal():
    config = small_config(
        vocab_size=5, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=4,
        num_kv_heads=4, head_dim=2,
    )  # fmt: skip
    assert tensor_legality(config, 4).illegal == {"vocabulary": "5 tokens leave a rank without any"}
    assert tensor_legality(config, 2).cut["vocabulary"] == 3
