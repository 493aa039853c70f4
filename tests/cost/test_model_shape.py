"""What a model's shape counts: against the decoder's own tensors, published figures, by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost.model_shape import (
    AttentionShape,
    FeedForwardShape,
    LayerShape,
    ModelShape,
    shape_of,
)
from phalanx.models.config import parse_config
from phalanx.models.known import known_shape
from phalanx.models.named import named_model, preset_names
from phalanx.models.spec import num_params
from tests.models.test_family_sizes import PUBLISHED

SMALL = ModelShape(
    name="small",
    hidden=10,
    vocab=21,
    tied_head=True,
    layers=(
        LayerShape(
            count=3,
            attention=AttentionShape(num_heads=4, num_kv_heads=2, head_dim=3, window=5),
            feed_forward=FeedForwardShape(width=7),
        ),
        LayerShape(
            count=1,
            attention=AttentionShape(num_heads=4, num_kv_heads=2, head_dim=3),
            feed_forward=FeedForwardShape(num_experts=6, num_active=2, expert_width=4),
        ),
    ),
)


@pytest.mark.parametrize("name", preset_names())
def test_parameters_of_presets_are_those_of_the_decoders_tensors(name):
    config = named_model(name, log=lambda _: None).config
    assert shape_of(config).num_params == num_params(config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_every_variant_are_those_of_the_decoders_tensors(name):
    """Shared keys, embeddings per layer, double widths and mixtures among them."""
    config = parse_config(PUBLISHED[name][0])
    assert shape_of(config).num_params == num_params(config)


def test_parameters_by_hand():
    attention = 10 * 12 + 2 * 10 * 6 + 12 * 10
    dense = 3 * 10 * 7
    experts = 10 * 6 + 6 * 3 * 10 * 4
    assert SMALL.layer_params == 4 * attention + 3 * dense + experts + 4 * 2 * 10
    assert SMALL.num_params == SMALL.layer_params + 21 * 10 + 10
    assert SMALL.expert_params == 6 * 3 * 10 * 4
    assert SMALL.active_params == SMALL.num_params - 4 * 3 * 10 * 4


def test_flops_by_hand():
    attention = 10 * 12 + 2 * 10 * 6 + 12 * 10
    used = 4 * attention + 3 * 3 * 10 * 7 + 10 * 6 + 2 * 3 * 10 * 4
    assert SMALL.product_flops_per_token == 2 * used
    assert SMALL.head_flops_per_token == 2 * 10 * 21
    # q k^T and the weighted values: 2 FLOPs for each of H C channels, twice
    per_pair = 2 * 2 * 4 * 3
    assert SMALL.attention_flops(8, 4.0) == 8 * 4 * per_pair * 4
    assert SMALL.attention_flops(8, 9.0) == 8 * per_pair * (3 * 5 + 9)


def test_a_dense_step_costs_six_flops_a_parameter():
    """Forward and backward of the products of a large model: 6 per parameter that multiplies."""
    shape = known_shape("llama-3.1-405b")
    multiplying = shape.num_params - shape.vocab * shape.hidden - (2 * 126 + 1) * 16384
    forward = shape.product_flops_per_token + shape.head_flops_per_token
    assert 3 * forward == 6 * multiplying


def test_a_window_clips_evenly_spread_queries_as_it_clips_each_of_them():
    shape = replace(SMALL, layers=SMALL.layers[:1])
    tokens, per_pair = 40, 3 * 2 * 2 * 4 * 3
    each = sum(min(at + 0.5, 5.0) for at in range(tokens)) * per_pair
    assert shape.attention_flops(tokens, tokens / 2, tokens) == pytest.approx(each, rel=0.01)


@given(mean=st.floats(1, 1e6), spread=st.floats(0, 1), window=st.integers(1, 10**6))
def test_a_window_never_adds_work_and_never_hides_more_than_it_can(mean, spread, window):
    layer = replace(SMALL.layers[0], attention=replace(SMALL.layers[0].attention, window=window))
    open_layer = replace(layer, attention=replace(layer.attention, window=0))
    limited, free = (replace(SMALL, layers=(each,)) for each in (layer, open_layer))
    longest = mean * (1 + spread)
    flops = limited.attention_flops(1, mean, longest)
    assert flops <= free.attention_flops(1, mean, longest) * (1 + 1e-9)
    assert flops <= limited.attention_flops(1, mean) * (1 + 1e-9)  # a mean of min <= min of means
    assert flops >= limited.attention_flops(1, mean * (1 - spread)) * (1 - 1e-6)


def test_deepseek_v3_caches_576_elements_a_token_and_layer():
    shape = known_shape("deepseek-v3")
    assert {layer.attention.cached_per_token for layer in shape.layers} == {576}
    assert shape.cached_per_token() == 61 * 576
    assert [layer.count for layer in shape.layers] == [3, 58]


def test_an_index_scores_all_keys_and_attention_sees_those_chosen():
    shape, plain = known_shape("deepseek-v3.2"), known_shape("deepseek-v3")
    long, longer = (shape.attention_flops(1, seen) for seen in (10_000, 20_000))
    assert longer - long == 61 * 2 * 64 * 128 * 10_000
    assert long < plain.attention_flops(1, 10_000)
    assert shape.cached_per_token() == 61 * (576 + 128)


def test_grouped_queries_cache_keys_and_values_of_their_groups():
    assert known_shape("llama-3.1-8b").cached_per_token() == 32 * 2 * 8 * 128
    # windows are not kept for ever: layers without one only
    assert known_shape("gpt-oss-120b").cached_per_token() == 18 * 2 * 8 * 64


def test_shared_keys_are_neither_projected_nor_cached():
    shape = known_shape("gemma4-e2b")
    sharing = [layer for layer in shape.layers if layer.attention.reuses_keys]
    assert sum(layer.count for layer in sharing) == 20
    for layer in sharing:
        names = {product.name for product in layer.products(shape.hidden)}
        assert not names & {"k_proj", "v_proj"}
        assert layer.attention.cached_per_token == 0


def test_a_linear_attention_keeps_a_state_and_no_tokens():
    """Qwen3-Next: 32 states of 128 x 128 in 36 of 48 layers."""
    shape = known_shape("qwen3-next-80b-a3b")
    linear = [layer for layer in shape.layers if layer.attention.kind == "linear"]
    assert sum(layer.count for layer in linear) == 36
    for layer in linear:
        assert layer.attention.state_elements == 32 * 128 * 128
        assert layer.attention.flops_per_pair == layer.attention.cached_per_token == 0
    assert shape.cached_per_token() == 12 * 2 * 2 * 256


def test_experts_of_a_latent_mixture_read_the_latent():
    """Nemotron 3 Super: 512 experts of two 1024 x 2688 matrices in 40 layers."""
    shape = known_shape("nemotron-3-super")
    assert shape.expert_params == 40 * 512 * 2 * 1024 * 2688


def test_tensor_parallelism_cuts_what_heads_and_widths_can_be_cut_into():
    for name in ("llama-3.1-8b", "deepseek-v3", "qwen3-next-80b-a3b", "gpt3-175b"):
        shape = known_shape(name)
        for layer in shape.layers:
            for product in layer.products(shape.hidden):
                side = {"column": product.outputs, "row": product.inputs}.get(product.split, 8)
                assert side % 8 == 0, product
