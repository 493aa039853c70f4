"""Projection of logs: written out once, and the laws that comparisons rest on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.grain import project
from phalanx.registry import GRAINS

LOG = [
    ("alloc", ""),
    ("all_gather", "gather:layers.0:F0"),
    ("attention.F", "0F0/layers.0.self_attn"),
    ("all_reduce", "0F0/layers.0.self_attn@tp"),
    ("mlp.F", "0F0/layers.0.mlp"),
    ("free", "free:layers.0:F0"),
    ("mlp.F", "0F0/layers.1.mlp"),
    ("send", "0SEND_F0"),
    ("recv", "0RECV_B0"),
    ("mlp.B", "0B0/layers.1.mlp"),
    ("mlp.B", "0B0/layers.0.mlp"),
    ("reduce_scatter", "reduce:layers.0:0"),
    ("all_reduce", "reduce:layers.0:0@replicate"),
    ("optimizer", "O"),
    ("all_reduce", "exchange.0@4"),
]


def test_every_grain_written_out():
    assert project(LOG, "operator") == LOG
    assert project(LOG, "unit") == [
        ("all_gather", "gather:layers.0:F0"),
        ("unit.F", "0F0/layers.0"),
        ("unit.F", "0F0/layers.1"),
        ("send", "0SEND_F0"),
        ("recv", "0RECV_B0"),
        ("unit.B", "0B0/layers.1"),
        ("unit.B", "0B0/layers.0"),
        ("reduce_scatter", "reduce:layers.0:0"),
        ("all_reduce", "reduce:layers.0:0@replicate"),
        ("optimizer", "O"),
        ("all_reduce", "exchange.0@4"),
    ]
    assert project(LOG, "stage") == [
        ("stage.F", "0F0"),
        ("send", "0SEND_F0"),
        ("recv", "0RECV_B0"),
        ("stage.B", "0B0"),
        ("optimizer", "O"),
        ("all_reduce", "exchange.0@4"),
    ]
    assert project(LOG, "step") == [("optimizer", "O"), ("all_reduce", "exchange.0@4")]


def test_units_without_a_number_keep_their_name():
    log = [
        ("embedding.F", "0F0/model.embed_tokens"),
        ("mlp.F", "0F0/model.layers.10.mlp.experts.3"),
    ]
    assert project(log, "unit") == [
        ("unit.F", "0F0/model.embed_tokens"),
        ("unit.F", "0F0/model.layers.10"),
    ]


def test_what_is_decided_is_never_merged_or_taken_for_a_step():
    decided = [("inner", ""), ("inner", ""), ("vote", "vote@5.2"), ("commit", "")]
    for grain in GRAINS:
        assert project(decided, grain) == decided


@given(st.lists(st.sampled_from(LOG), max_size=20))
def test_projecting_in_two_steps_is_projecting_once(log):
    for at, coarse in enumerate(GRAINS):
        for fine in GRAINS[at:]:
            assert project(project(log, fine), coarse) == project(log, coarse)


def test_an_unknown_grain_names_the_known():
    with pytest.raises(PlanError) as caught:
        project(LOG, "layer")
    assert (caught.value.code, caught.value.legal) == ("plan/illegal", GRAINS)
