"""Which plans exist, and why others do not."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cost.model_shape import (
    AttentionShape,
    FeedForwardShape,
    LayerShape,
    ModelShape,
    shape_of,
)
from phalanx.cost.training_plans import CONTEXT_KINDS, SCHEDULES
from phalanx.layout.tensor_split import tensor_legality
from phalanx.models.named import named_model, preset_names
from phalanx.planner import legality
from phalanx.planner.columns import Table
from phalanx.planner.legality import sizes_of
from phalanx.planner.rows import FixedRows
from phalanx.planner.space import list_layouts, num_plans, with_rows
from phalanx.planner.training import fixed_mesh
from tests.planner.plan_cases import CONFIG

MIXTURE = ModelShape(
    name="mixture", hidden=64, vocab=100,
    layers=(
        LayerShape(
            count=6,
            attention=AttentionShape(num_heads=8, num_kv_heads=2, head_dim=8),
            feed_forward=FeedForwardShape(num_experts=12, num_active=2, expert_width=48),
        ),
    ),
)  # fmt: skip


def found(number, *, shape=None, seq=4096, rows=64, domain=8, whole=True, mesh=None):
    source = FixedRows(seq, rows)
    sizes = sizes_of(
        shape or shape_of(CONFIG), row_tokens=seq, rows=rows, is_fixed=True, domain=domain
    )
    illegal = Counter()
    layouts = list_layouts(sizes, number, trains_all=whole, illegal=illegal, mesh=mesh)
    table = with_rows(layouts, source.options, recompute=(0, 1, 2), illegal=illegal)
    assert len(table) <= num_plans(layouts, source.options, (0, 1, 2))
    return table, illegal


@settings(max_examples=40, deadline=None)
@given(
    number=st.integers(1, 96),
    rows=st.integers(1, 48),
    seq=st.sampled_from([96, 1000, 4096, 8192]),
    domain=st.integers(1, 16),
    whole=st.booleans(),
)
def test_every_plan_uses_all_devices_and_computes_the_whole_batch(number, rows, seq, domain, whole):
    table, illegal = found(number, seq=seq, rows=rows, domain=domain, whole=whole)
    assert all(count > 0 for count in illegal.values())
    t = table.columns
    assert (t["tensor"] * t["context"] * t["pipeline"] * t["data"] == number).all()
    assert (t["micro_rows"] * t["num_micro"] * t["data"] == rows).all()
    assert (8 % t["tensor"] == 0).all() and (t["tensor"] <= max(domain, 8)).all()
    ranks = t["data"] * t["context"]
    assert (ranks % t["shard"] == 0).all() and ((t["zero"] > 0) <= (t["shard"] > 1)).all()
    assert ((t["pipeline"] > 1) | ((t["virtual"] == 1) & (t["schedule"] == 1))).all()
    assert ((t["pipeline"] == 1) | (t["zero"] < 3)).all()
    late = (t["pipeline"] > 1) & (t["schedule"] == 0)
    assert (t["num_micro"][late] < t["pipeline"][late]).all()
    assert (t["pipeline"] * t["virtual"] <= CONFIG.num_layers + 2).all()
    assert ((t["context"] == 1) | (seq % (2 * t["context"]) == 0)).all()
    rounds = (t["pipeline"] == 1) | (t["schedule"] == 0) | (t["num_micro"] >= t["pipeline"])
    assert rounds.all()
    listed = np.stack(list(t.values()), axis=1)
    assert len(np.unique(listed, axis=0)) == len(table)


def test_plans_of_two_devices_by_hand():
    """Replicas, ZeRO 1, 2, 3, 3 kept; tensor with and without split tokens; a pipeline of two; two
    context ranks in three ways with whole states or one of four sharded forms."""
    table, illegal = found(2, rows=2)
    data = 1 + 4
    tensor = 2
    context = 3 * (1 + 4)
    rows = {1: 2, 2: 1}  # data ranks -> ways to fill micro-batches: one row, or two
    # of two micro-batches: 1f1b, zero-bubble, zbv, a wave, interleaved by 2 and by 3 (of 4 layers,
    # and 4 with embedding and head); of one: all forwards first; dualpipe and dualpipe-v need four
    pipeline = 6 + 1  # nothing to shard on one data rank
    assert len(table) == 3 * (data * rows[2] + tensor * rows[1] + pipeline + context * rows[1])
    assert set(illegal) == {legality.NO_ROUND, legality.NO_LAYERS}
    # virtual 4, 6, 8, 12, two and four waves on two ranks: more than 6 stages
    assert illegal[legality.NO_LAYERS] == 6


@pytest.mark.parametrize("name", preset_names())
def test_tensor_degrees_are_those_that_the_trainer_can_cut(name):
    config = named_model(name).config
    sizes = sizes_of(shape_of(config), row_tokens=4096, rows=64, is_fixed=True, domain=64)
    degrees = np.arange(1, 65)
    one = np.ones_like(degrees)
    table = Table({"tensor": degrees, "pipeline": one, "context": one, "data": one})
    broken = legality.axis_rules(sizes, table)[legality.NO_CUT]
    assert [not tensor_legality(config, int(n)).illegal for n in degrees] == (~broken).tolist()


def test_reasons_of_tensor_pipeline_context_and_data_degrees():
    _, illegal = found(6, rows=4, seq=1000)
    assert illegal[legality.NO_CUT] > 0  # 3 and 6 do not cut 8 heads
    assert illegal[legality.NO_TOKENS] > 0  # a row of 1,000 tokens is for one rank
    assert illegal[legality.NO_WORK] > 0  # 6 data ranks, 4 rows
    assert illegal[legality.NO_SHARE] > 0  # 3 data ranks, 4 rows
    llama = shape_of(named_model("llama-3.1-8b").config)
    _, illegal = found(16, shape=llama, domain=4)  # 16 cuts its 32 heads, over two hosts or more
    assert illegal[legality.NO_DOMAIN] > 0
    _, illegal = found(8, seq=4100)
    assert illegal[legality.NO_CHUNKS] > 0
    _, illegal = found(64, rows=4096, seq=4096)
    assert illegal[legality.NO_LAYERS] > 0


def test_a_pipeline_may_hold_two_more_stages_than_layers():
    """Embedding and head count as layers: 126 on 128 stages (DOI 10.1145/3695053.3731410)."""
    llama = shape_of(named_model("llama-3.1-405b").config)
    table, _ = found(16384, shape=llama, seq=8192, rows=2048)
    published = (
        (table["tensor"] == 8) & (table["pipeline"] == 16) & (table["data"] == 128)
        & (table["virtual"] == 8) & (table["context"] == 1)
    )  # fmt: skip
    assert published.any() and (table["pipeline"] * table["virtual"]).max() == 128


def test_interleaving_needs_a_micro_batch_per_stage_and_a_fold_twice_as_many():
    table, _ = found(4, rows=4, whole=False)
    interleaved = table.keep(table["schedule"] == SCHEDULES.index("interleaved"))
    assert len(interleaved) and (interleaved["num_micro"] >= interleaved["pipeline"]).all()
    folded = table.keep(table["schedule"] == SCHEDULES.index("dualpipe"))
    assert len(folded) and (folded["num_micro"] >= 2 * folded["pipeline"]).all()
    assert set(found(3, rows=6)[1]) >= {legality.NO_FOLD}


def test_ulysses_needs_a_head_for_every_rank_and_linear_attention_needs_ulysses():
    table, illegal = found(16, seq=65536, rows=1, domain=16)
    by_heads = table["context_kind"] == CONTEXT_KINDS.index("ulysses")
    assert by_heads.any() and illegal[legality.NO_CUT] > 0
    assert (8 % (table["tensor"] * table["context"])[by_heads] == 0).all()
    linear = AttentionShape(kind="linear", num_heads=8, num_kv_heads=8, head_dim=8)
    layer = LayerShape(count=2, attention=linear, feed_forward=FeedForwardShape(width=64))
    shape = ModelShape(name="linear", hidden=64, vocab=100, layers=(layer,))
    table, illegal = found(4, shape=shape, seq=8192, rows=1)
    kinds = set(table["context_kind"][table["context"] > 1].tolist())
    assert kinds == {CONTEXT_KINDS.index("ulysses")} and illegal[legality.NO_STATE] > 0


def test_experts_are_spread_over_divisors_of_them_and_no_more_ranks_than_there_are():
    table, illegal = found(8, shape=MIXTURE, rows=8)
    t = table.columns
    assert set(t["expert"].tolist()) == {1, 2, 4}  # of 1, 2, 3, 4, 6, 12
    ranks = t["tensor"] * t["context"] * t["data"]
    assert (ranks % (t["expert"] * t["expert_tensor"]) == 0).all()
    assert set(np.unique(t["expert_tensor"] - t["tensor"])) <= {0, -1, -3, -7}
    assert illegal[legality.NO_EXPERTS] > 0
    dense, _ = found(8, rows=8)
    assert set(dense["expert"].tolist()) == {1}


def test_hybrid_shards_stand_inside_a_domain_with_replicas_across():
    table, _ = found(32, rows=32)
    near = (table["zero"] == 3) & (table["shard"] < table["data"] * table["context"])
    assert near.any()
    assert set((table["shard"] * table["tensor"])[near].tolist()) == {8}


def test_chunks_of_a_pipeline_hold_equal_numbers_of_layers():
    """6 layers: 2 ranks of 3 chunks, or, with embedding and head, of 2 or 4."""
    table, illegal = found(2, shape=MIXTURE, rows=8)
    at = (table["schedule"] == SCHEDULES.index("interleaved")) & (table["pipeline"] == 2)
    assert set(table["virtual"][at].tolist()) == {2, 3, 4}
    llama = shape_of(named_model("llama-3.1-8b").config)
    _, illegal = found(2, shape=llama, rows=8)
    assert illegal[legality.NO_CHUNK] > 0  # 6, 12 or 24 chunks do not cut 32 layers, nor 34


def test_adapters_shard_weights_or_nothing():
    table, _ = found(8, rows=8, whole=False)
    flat = table.keep(table["pipeline"] == 1)
    assert set(flat["zero"].tolist()) == {0, 3}


def test_a_mesh_that_the_job_names_is_kept_where_it_fits():
    assert fixed_mesh({"shard": 2}, 2) == {"shard": 2}
    assert fixed_mesh({"shard": 2}, 4) is None and fixed_mesh({"ep": 2}, 2) is None
    assert fixed_mesh({}, 1) is None
    table, _ = found(8, mesh={"shard": 4, "tp": 2})
    assert {(s, t) for s, t in zip(table["shard"], table["tensor"])} == {(4, 2)}
    assert set(table["zero"].tolist()) == {3}
    table, _ = found(8, mesh={"replicate": 4, "tp": 2})
    assert set(table["shard"].tolist()) == {1} and len(table)
    table, _ = found(8, mesh={"replicate": 2, "shard": 4})
    assert set(zip(table["shard"].tolist(), table["zero"].tolist())) == {(4, 3)}


def test_a_table_counts_a_row_under_the_first_rule_that_it_breaks():
    table = Table({"n": np.arange(6)})
    illegal = Counter()
    kept = table.obey(illegal, {"even": table["n"] % 2 == 0, "small": table["n"] < 3})
    assert kept["n"].tolist() == [3, 5] and illegal == {"even": 3, "small": 1}
    crossed = kept.cross({"m": (7, 8, 9)})
    assert crossed["n"].tolist() == [3, 3, 3, 5, 5, 5]
    assert crossed["m"].tolist() == [7, 8, 9, 7, 8, 9]
    by = kept.cross_by("n", lambda n: {"k": range(n - 2)})
    assert by["n"].tolist() == [3, 5, 5, 5] and by["k"].tolist() == [0, 0, 1, 2]
