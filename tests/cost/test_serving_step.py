"""Steps of engines that are not here: Seesaw's table by hand, and what can only grow."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost.serving_efficiency import COEFFICIENTS, FIXED, UNSEEN, serving_efficiency
from phalanx.cost.serving_plans import join_plans, serving_plans
from phalanx.cost.serving_step import (
    decode_parts,
    decode_s,
    expert_skew,
    kv_room_tokens,
    kv_token_bytes,
    prefill_parts,
    prefill_s,
    smooth_max,
    touched_experts,
    weight_bytes,
)
from phalanx.cost.serving_work import work_of
from phalanx.errors import JobError
from phalanx.hardware import read_machine
from phalanx.models.known import known_shape

H100 = read_machine("h100")
LLAMA = known_shape("meta-llama/Llama-3.1-70B")
DEEPSEEK = known_shape("deepseek-ai/DeepSeek-V3")
# what Seesaw's model assumes: every share is reached, nothing costs time to start
IDEAL = {name: np.ones(1) for name in (*COEFFICIENTS, *FIXED)} | {
    name: np.zeros(1) for name in COEFFICIENTS if name.endswith("_s") or name == "small_tokens"
}
SHIPPED = serving_efficiency()


def plan(shape=LLAMA, **degrees):
    return serving_plans(shape, H100, **degrees)


def column(value):
    return np.asarray([float(value)])


def test_a_decoding_step_reads_each_weight_once():
    work = work_of(LLAMA)
    params = (work.attention_params + work.dense_params + work.vocab * work.hidden)[0]
    assert params == pytest.approx(69.5e9, rel=0.01)  # all but the embedding
    parts = decode_parts(plan(), column(1), column(1), IDEAL)
    assert parts["weights"][0] == pytest.approx(2 * params / 3350e9, rel=1e-3)


def test_a_large_batch_is_bound_by_its_products():
    parts = decode_parts(plan(), column(8192), column(1), IDEAL)
    params = 69.5e9
    assert parts["weights"][0] == pytest.approx(2 * 8192 * params / 794.5e12, rel=0.02)


def test_decode_attention_reads_four_bytes_per_key_channel_and_layer():
    parts = decode_parts(plan(), column(3), column(1000), IDEAL)
    by_hand = 4 * 3 * 1000 * 8 * 128 * 80 / 3350e9
    assert parts["attention"][0] == pytest.approx(by_hand, rel=0.02)


def test_a_prompt_costs_two_flops_per_weight_and_token():
    parts = prefill_parts(plan(), column(4096), column(1), IDEAL)
    layers = (work_of(LLAMA).attention_params + work_of(LLAMA).dense_params)[0]
    assert parts["weights"][0] == pytest.approx(2 * 4096 * layers / 794.5e12, rel=0.02)
    scores = 4 * 64 * 128 * 80 * 4096**2 / 2 / 794.5e12
    assert parts["attention"][0] == pytest.approx(scores)


def test_two_all_reduces_a_layer_move_two_shares_of_a_message_each():
    parts = decode_parts(plan(tensor=4), column(16), column(1), IDEAL)
    message = 16 * 8192 * 2
    assert parts["network"][0] == pytest.approx(80 * 2 * 2 * (3 / 4) * message / 450e9)


def test_one_device_has_no_network():
    assert decode_parts(plan(), column(16), column(1), IDEAL)["network"][0] == 0.0


@pytest.mark.parametrize(
    ("shape", "kv_precision", "tensor", "by_hand"),
    [
        (LLAMA, "bf16", 1, 2 * 80 * 8 * 128 * 2),
        (LLAMA, "fp8", 8, 2 * 80 * 128),
        (LLAMA, "fp8", 16, 2 * 80 * 128),  # each rank of two keeps the same head
        (DEEPSEEK, "fp8", 1, 61 * 576),
        (DEEPSEEK, "fp8", 8, 61 * 576),  # a latent is on every tensor rank
    ],
)
def test_bytes_of_a_cached_token(shape, kv_precision, tensor, by_hand):
    plans = plan(shape, tensor=tensor, kv_precision=kv_precision)
    assert kv_token_bytes(plans, 100.0)[0] == by_hand


def test_an_index_limits_what_is_read_and_not_what_is_kept():
    """DeepSeek V3.2 keeps 576 + 128 elements a token and reads 2048 latents and every key."""
    work = work_of(known_shape("DeepSeek-V3.2"))
    assert work.kept_per_token(1, column(1e5))[0] == 61 * 704
    assert work.read_per_row(8, column(1e5))[0] == 61 * (2048 * 576 + 1e5 * 128)


def test_a_window_limits_both():
    work = work_of(known_shape("gpt-oss-120b"))
    per_layer = 2 * 8 * 64
    assert work.read_per_row(1, column(1024))[0] == 18 * per_layer * (1024 + 128)
    assert work.kept_per_token(1, column(1024))[0] == 18 * per_layer * (1 + 128 / 1024)


def test_room_for_caches_is_what_weights_and_activations_leave():
    plans = plan(tensor=4, pipeline=2)
    kept = kv_room_tokens(plans, 500.0) * kv_token_bytes(plans, 500.0)
    activations = 8192 * 8192 * 8 * 2 + 2**30
    assert kept + weight_bytes(plans) + activations == pytest.approx(H100.usable_bytes)
    assert weight_bytes(plans)[0] == pytest.approx(2 * 70.6e9 / 8, rel=0.01)


def test_tensor_and_pipeline_grow_the_batch_more_than_their_devices():
    """Seesaw: b_max rises faster than TP x PP, because weights take a smaller share."""
    one, two = kv_room_tokens(plan(tensor=[2, 4], pipeline=2), 500.0)
    assert two > 2 * one > 0


def test_experts_that_a_batch_touches():
    assert touched_experts(column(4), column(1), column(2))[0] == pytest.approx(1.75)
    assert touched_experts(column(256), column(8), column(1))[0] == pytest.approx(8)
    assert touched_experts(column(256), column(8), column(1e6))[0] == pytest.approx(256)


def test_skew_falls_as_more_tokens_choose():
    few, many = expert_skew(np.asarray([8.0, 800.0]), column(8), column(1.0))
    assert 3.0 >= few > many > 1.0
    assert expert_skew(column(8), column(1), column(1.0))[0] == 1.0


def test_a_smooth_maximum_is_at_least_the_larger():
    assert smooth_max(column(3), column(0))[0] == pytest.approx(3)
    assert smooth_max(column(3), column(3))[0] == pytest.approx(3 * 2 ** (1 / 3))


def test_four_bit_experts_leave_the_rest_in_bf16():
    plans = serving_plans(DEEPSEEK, read_machine("b200"), precision="fp4")
    assert (plans.dense_bytes[0], plans.expert_bytes[0]) == (2.0, 0.5625)
    dense = serving_plans(LLAMA, read_machine("b200"), precision="fp4")
    assert dense.dense_bytes[0] == 0.5625


def test_joined_plans_cost_what_each_costs():
    """Models with different kinds of attention share one table."""
    plans = [plan(tensor=2), plan(known_shape("gpt-oss-120b")), plan(DEEPSEEK, attention_dp=8)]
    joined = join_plans(plans)
    rows, context = column(7), column(900)
    alone = [decode_s(each, rows, context, SHIPPED.rates(each))[0] for each in plans]
    together = decode_s(joined, np.full(3, 7.0), np.full(3, 900.0), SHIPPED.rates(joined))
    assert together == pytest.approx(alone)


@pytest.mark.parametrize("shape", [LLAMA, DEEPSEEK, known_shape("Qwen/Qwen3.5-397B-A17B")])
@given(rows=st.floats(1, 4000), context=st.floats(1, 2e5), more=st.floats(1.01, 8))
def test_a_token_takes_longer_with_more_rows_and_longer_contexts(shape, rows, context, more):
    plans = serving_plans(shape, H100, tensor=8, precision="fp8")
    rates = SHIPPED.rates(plans)
    time = decode_s(plans, column(rows), column(context), rates)
    assert decode_s(plans, column(rows * more), column(context), rates) >= time
    assert decode_s(plans, column(rows), column(context * more), rates) >= time


@given(tokens=st.floats(1, 1e6), more=st.floats(1.01, 8))
def test_a_longer_prompt_takes_longer(tokens, more):
    plans = plan(tensor=8)
    rates = SHIPPED.rates(plans)
    time = prefill_s(plans, column(tokens), column(1), rates)
    assert prefill_s(plans, column(tokens * more), column(1), rates) > time


@pytest.mark.parametrize("shape", [LLAMA, DEEPSEEK])
def test_more_tensor_ranks_never_need_more_memory(shape):
    plans = plan(shape, tensor=[1, 2, 4, 8, 16])
    assert (np.diff(weight_bytes(plans)) < 0).all()
    assert (np.diff(kv_token_bytes(plans, 1000.0)) <= 0).all()


def test_what_was_never_measured_gets_the_value_of_all():
    unknown = dataclasses.replace(H100, name="unheard-of", vendor="Nobody")
    plans = serving_plans(LLAMA, unknown, software="unheard-of:9")
    plans = dataclasses.replace(plans, precision=np.asarray(["unheard-of"], dtype=object))
    rates = SHIPPED.rates(plans)
    assert {name: column[0] for name, column in rates.items()} == {**SHIPPED.values, **FIXED}
    assert "accelerator unheard-of: no rows; the value for all is taken" in SHIPPED.describe(plans)


def test_an_unknown_device_gets_the_factors_of_its_generation():
    unknown = serving_plans(LLAMA, dataclasses.replace(H100, name="unheard-of"), software="vllm")
    known = dataclasses.replace(unknown, hardware=np.asarray(["Nobody 1"], dtype=object))
    factor = SHIPPED.factors["reduce_s"]["hardware"]["NVIDIA Hopper"]
    rates = SHIPPED.rates(unknown)["reduce_s"] / SHIPPED.rates(known)["reduce_s"]
    assert rates[0] == pytest.approx(factor)


def test_an_engine_without_a_version_is_the_newest_that_has_rows():
    newest = SHIPPED.newest("vllm")
    assert newest == "0.19"  # of the rows; 0.9 is older
    rates = [SHIPPED.rates(plan(software=name)) for name in ("vllm", f"vllm:{newest}")]
    assert rates[0] == rates[1]


def test_bars_are_wider_where_there_are_no_rows():
    low, high = SHIPPED.bar("tpot_s", "closed vllm")
    wide_low, wide_high = SHIPPED.bar("tpot_s", UNSEEN)
    assert wide_low < low < 1 < high < wide_high


def test_shares_are_shares():
    for name, value in SHIPPED.values.items():
        assert value > 0
        if name.endswith("_share") and name != "expert_share":
            assert value < 1.05


def test_slow_links_favour_pipelines_for_prompts_and_tensor_parallelism_for_answers():
    """Seesaw, Fig. 1: a 13B model on 8 L4 cards behind PCI Express, 16 sequences."""
    plans = serving_plans(
        known_shape("Llama-2-13b"), read_machine("l4"), tensor=[1, 2, 4, 8], pipeline=[8, 4, 2, 1]
    )
    rates = SHIPPED.rates(plans)
    rows, tokens = np.full(4, 16.0), np.full(4, 1000.0)
    prompts = prefill_s(plans, tokens, np.ones(4), rates) / plans.pipeline
    answers = decode_s(plans, rows, tokens, rates)
    assert np.argmin(prompts) == 0
    assert np.argmin(answers) in (2, 3)
    assert answers[0] > 2 * answers.min()


@pytest.mark.parametrize(
    ("wrong", "where"), [({"tensor": [2, 0]}, "tensor"), ({"precision": "fp5"}, "precision")]
)
def test_plans_that_cannot_be_are_refused(wrong, where):
    with pytest.raises(JobError, match=where):
        plan(**wrong)


def test_cached_tokens_cost_no_products_but_are_attended_to():
    """4,096 of 8,192 tokens cached: half the products; three quarters of the causal pairs."""
    whole = prefill_parts(plan(), column(8192), column(1), IDEAL)
    rest = prefill_parts(plan(), column(8192), column(1), IDEAL, column(4096))
    assert rest["attention"][0] == pytest.approx(0.75 * whole["attention"][0])
    half = prefill_parts(plan(), column(4096), column(1), IDEAL)
    assert rest["weights"][0] == half["weights"][0]
    rates = SHIPPED.rates(plan())
    nothing = prefill_parts(plan(), column(8192), column(1), rates, column(0))
    assert nothing == prefill_parts(plan(), column(8192), column(1), rates)
