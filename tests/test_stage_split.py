"""Stages of a pipeline: lightest heaviest stage, ends weighed as layers, sharing layers kept."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.layout.stage_split import (
    StageRange,
    job_stages,
    legal_cuts,
    split_layers,
    stage_ranges,
    stage_weights,
)
from phalanx.models.named import named_model
from phalanx.models.spec import LoraSpec
from tests.models.families import tiny_config
from tests.tiny_run import tiny_base

LORA = LoraSpec(rank=2, alpha=4.0)


def sizes(stages: tuple[StageRange, ...]) -> list[int]:
    return [stage.stop - stage.start for stage in stages]


def test_llama_3_gets_one_layer_less_at_either_end():
    config = named_model("llama-3.1-405b").config
    assert sizes(split_layers(config, 16)) == [7, *[8] * 14, 7]
    assert sizes(split_layers(config, 128)) == [0, *[1] * 126, 0]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(1, 9), st.integers(8, 900), st.booleans(), st.booleans())
def test_no_other_split_has_a_lighter_heaviest_stage(layers, stages, vocabulary, tied, is_lora):
    config = tiny_base(num_layers=layers, vocab_size=vocabulary, tied_head=tied)
    lora = LORA if is_lora else None
    bare = 0 if is_lora else 1  # end stages without a layer
    if stages > layers + 2 * bare:
        with pytest.raises(PlanError) as caught:
            split_layers(config, stages, lora=lora)
        assert caught.value.legal[0] == layers + 2 * bare
        return
    found = split_layers(config, stages, lora=lora)
    weights = stage_weights(config, lora=lora)
    heaviest = max(map(weights.of, found))
    ends = [
        (0, *cuts, layers) for cuts in combinations_with_replacement(range(layers + 1), stages - 1)
    ]
    for cuts in ends:
        every = stage_ranges(list(pairwise(cuts)))
        inner = every if is_lora else every[1:-1]
        if all(stage.stop > stage.start for stage in inner):
            assert heaviest <= max(map(weights.of, every)) * (1 + 1e-9)


def test_stages_cover_every_layer_once_and_know_their_ends():
    found = split_layers(tiny_base(num_layers=11), 4)
    assert [at for stage in found for at in range(stage.start, stage.stop)] == list(range(11))
    assert [stage.embeds for stage in found] == [True, False, False, False]
    assert [stage.ends for stage in found] == [False, False, False, True]


def test_equal_layers_weigh_one_and_a_head_counts_where_it_is_computed():
    config = tiny_base(num_layers=5, window=None, full_every=1)
    weights = stage_weights(config)
    assert weights.layers == pytest.approx([1.0] * 5)
    rare = stage_weights(config, counted_frac=0.1)
    assert rare.head < weights.head and rare.embedding == weights.embedding


def test_layers_that_share_keys_stay_with_their_source():
    config = replace(tiny_base(num_layers=6), kv_sources=(0, 1, 2, 3, 2, 3))
    assert legal_cuts(config) == [0, 1, 2, 6]
    assert [stage.start for stage in split_layers(config, 5)] == [0, 0, 1, 2, 6]
    with pytest.raises(PlanError, match="share keys and values stay together") as caught:
        split_layers(config, 6)
    assert caught.value.legal[0] == 5


def test_layers_that_read_the_tokens_are_not_cut_off_from_them():
    config = tiny_config("gemma4_ple", "float32")
    assert sizes(split_layers(config, 1)) == [config.num_layers]
    with pytest.raises(PlanError, match="every layer reads the tokens") as caught:
        split_layers(config, 2)
    assert list(caught.value.legal) == [1]


@pytest.mark.parametrize(
    ("stages", "at"), [([[0, 2], [3, 4]], 1), ([[1, 4]], 0), ([[0, 3], [3, 2]], 1)]
)
def test_ranges_with_gaps_are_refused_with_the_beginning_they_need(stages, at):
    with pytest.raises(PlanError, match=f"stage {at} must begin at layer"):
        stage_ranges(stages)


def test_a_pipeline_without_stages_is_refused():
    with pytest.raises(PlanError, match="at least one stage") as caught:
        split_layers(tiny_base(num_layers=2), 0, where="plan.mesh.pp")
    assert caught.value.where == "plan.mesh.pp" and caught.value.legal[0] == 1


def test_a_job_names_its_stages_or_gets_the_lightest():
    config = tiny_base(num_layers=5)
    assert job_stages(config, 2, 2) == split_layers(config, 2)
    assert sizes(job_stages(config, 3, 3, (0, 4, 1))) == [0, 4, 1]


@pytest.mark.parametrize(
    ("given", "lora", "says"),
    [
        ((2, 3, 0, 0), None, "must hold 5 layers in 3 stages"),
        ((2, 2, 2), None, "must hold 5 layers in 3 stages"),
        ((6, -1, 0), None, "must hold 5 layers in 3 stages"),
        ((5, 0, 0), None, "without anything to train"),
        ((0, 4, 1), LORA, "without anything to train"),
    ],
)
def test_named_stages_that_cannot_be_are_refused_with_some_that_can(given, lora, says):
    config = tiny_base(num_layers=5)
    with pytest.raises(PlanError, match=says) as caught:
        job_stages(config, 3, 3, given, lora=lora)
    assert caught.value.where == "plan.stages"
    assert caught.value.legal == (sizes(split_layers(config, 3, lora=lora)),)


def test_too_many_stages_of_a_rank_are_refused_with_as_many_as_it_can_have():
    config = tiny_base(num_layers=5)
    with pytest.raises(PlanError) as caught:
        job_stages(config, 12, 3)
    assert caught.value.sentence() == (
        "plan.pipeline = 12 stages, 4 on each of 3 ranks: 5 layers fill at most 7 stages, so that "
        "one stays empty; nearest legal values: 2 on each"
    )
    with pytest.raises(PlanError, match=r"plan\.mesh\.pp = 8: 5 layers") as caught:
        job_stages(config, 8, 8)
    assert caught.value.legal == (7, 6)
