"""Peak memory of training plans: laws, and numbers that papers print."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from phalanx.cost.memory_formulas import (
    distributed_optimizer_bytes,
    first_stage_layers,
    layer_activation_bytes,
    zero_bytes,
)
from phalanx.cost.memory_software import memory_profile, memory_software_names
from phalanx.cost.model_shape import AttentionShape, FeedForwardShape, LayerShape, ModelShape
from phalanx.cost.training_memory import TERMS, training_memory
from phalanx.cost.training_plans import TrainingPlans
from phalanx.errors import JobError
from phalanx.hardware import read_machine

H100 = read_machine("h100")


def decoder(
    layers=16, hidden=2048, heads=16, kv_heads=4, width=5632, vocab=32000, gated=True, **block
):
    attention = AttentionShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=hidden // heads)
    feed_forward = FeedForwardShape(width=width, is_gated=gated, **block)
    layer = LayerShape(count=layers, attention=attention, feed_forward=feed_forward)
    return ModelShape(name="a decoder", hidden=hidden, vocab=vocab, layers=(layer,))


def gpt(layers, hidden, heads, vocab=51200):
    return decoder(layers, hidden, heads, heads, 4 * hidden, vocab, gated=False)


def terms(shape, **plan):
    return training_memory(shape, TrainingPlans(**plan), H100)


@pytest.mark.parametrize(
    "layers, hidden, heads, pipeline, virtual, ratio",
    [
        (48, 6144, 64, 1, 1, 0.161),
        (96, 12288, 96, 8, 3, 0.185),
        (105, 20480, 128, 35, 3, 0.202),
        (128, 25600, 160, 64, 1, 0.202),
    ],
)
def test_figure_7_of_korthikanti_by_formula_and_by_plans(
    layers, hidden, heads, pipeline, virtual, ratio
):
    sizes = {"seq": 2048, "batch": 1, "hidden": hidden, "heads": heads, "tensor": 8}
    least = layer_activation_bytes(**sizes, sequence_parallel=True, recompute="selective")
    assert least / layer_activation_bytes(**sizes) == pytest.approx(ratio, abs=0.0006)
    kept = []
    for split, recompute in ((1, 1), (0, 0)):
        found = terms(
            gpt(layers, hidden, heads),
            tensor=8,
            pipeline=pipeline,
            virtual=virtual,
            schedule=2 if virtual > 1 else 1,
            num_micro=512,
            row_tokens=2048,
            sequence_parallel=split,
            recompute=recompute,
            software="megatron:2022",
        )
        kept.append(found.terms["activations"].item())
    assert kept[0] / kept[1] == pytest.approx(ratio, abs=0.0006)


def test_a_gpt_layer_keeps_34_sbh_and_the_first_stage_a_model_of_them():
    found = terms(
        gpt(96, 12288, 96),
        pipeline=8,
        virtual=3,
        schedule=2,
        num_micro=64,
        micro_rows=2,
        row_tokens=2048,
        recompute=1,
        software="megatron:2022",
    )
    layer = layer_activation_bytes(2048, 2, 12288, 96, recompute="selective")
    assert layer == 34 * 2048 * 2 * 12288
    expected = layer * first_stage_layers(96, 8, 3)
    assert found.terms["activations"].item() == pytest.approx(expected)


def test_optimizer_bytes_are_18_or_6_and_12_over_d():
    shape = gpt(24, 1024, 16)
    for zero, shard in ((0, 1), (1, 8), (1, 64)):
        found = terms(shape, data=64, shard=shard, zero=zero, row_tokens=512)
        held = sum(found.terms[name].item() for name in ("weights", "gradients", "moments"))
        assert held == pytest.approx(shape.num_params * (6 + 12 / shard))
        assert held == pytest.approx(distributed_optimizer_bytes(shape.num_params, shard))


@pytest.mark.parametrize("stage, gigabytes", [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_figure_1(stage, gigabytes):
    assert zero_bytes(7.5e9, 64, stage) / 1e9 == pytest.approx(gigabytes, abs=0.06)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_deepspeed_holds_the_bytes_of_its_paper(zero):
    shape = gpt(24, 1024, 16)
    found = terms(shape, data=64, shard=64, zero=zero, row_tokens=512, software="deepspeed")
    held = sum(found.terms[name].item() for name in ("weights", "gradients", "moments"))
    assert held == pytest.approx(zero_bytes(shape.num_params, 64, zero))


SOFTWARE = st.sampled_from(memory_software_names())
POWERS = st.sampled_from([1, 2, 4, 8])
PLANS = st.fixed_dictionaries(
    {
        "software": SOFTWARE,
        "tensor": POWERS,
        "pipeline": POWERS,
        "context": POWERS,
        "data": st.just(8),
        "shard": st.sampled_from([1, 2, 8]),
        "zero": st.integers(0, 3),
        "virtual": st.sampled_from([1, 2]),
        "schedule": st.integers(0, 5),
        "context_kind": st.integers(0, 2),
        "sequence_parallel": st.integers(0, 1),
        "recompute": st.integers(0, 2),
        "num_micro": st.integers(1, 40),
        "offload": st.sampled_from([0.0, 1.0]),
        "expert": st.sampled_from([1, 2, 8]),
    }
)
SHAPES = st.sampled_from(
    [
        decoder(),
        gpt(14, 1536, 12, 50257),
        decoder(layers=6, num_experts=16, num_active=3, expert_width=704),
    ]
)


@given(SHAPES, PLANS, st.lists(st.integers(1, 1 << 20), min_size=2, max_size=8))
def test_peak_grows_with_context(shape, plan, lengths):
    peak = terms(shape, **plan, row_tokens=np.sort(lengths)).peak_bytes
    assert (np.diff(peak) >= 0).all()


@given(SHAPES, PLANS, st.lists(st.integers(1, 512), min_size=2, max_size=8))
def test_peak_grows_with_the_micro_batch(shape, plan, rows):
    peak = terms(shape, **plan, micro_rows=np.sort(rows), row_tokens=777).peak_bytes
    assert (np.diff(peak) >= 0).all()


@given(SHAPES, PLANS)
def test_peak_does_not_grow_with_shards(shape, plan):
    plan["shard"] = np.array([1, 2, 3, 8, 64])
    peak = terms(shape, **plan, row_tokens=777).peak_bytes
    assert (np.diff(peak) <= 1e-6 * peak[1:]).all()


@given(SHAPES, PLANS, st.sampled_from([4, 8, 16]))
def test_lora_takes_no_more_than_full_where_adapters_read_what_is_kept(shape, plan, bits):
    """PEFT copies every adapter's input to float32, which can outweigh moments in host memory."""
    assume(not memory_profile(plan["software"]).adapter_input_bytes)
    full = terms(shape, **plan, row_tokens=777, method="full").peak_bytes
    adapters = {"method": "lora", "lora_rank": 8, "base_bits": bits}
    assert terms(shape, **plan, row_tokens=777, **adapters).peak_bytes <= full


@given(SHAPES, PLANS)
def test_terms_sum_to_the_peak_inside_its_bar(shape, plan):
    found = terms(shape, **plan, row_tokens=np.array([512, 1024]))
    assert tuple(found.terms) == TERMS
    assert all((term >= 0).all() for term in found.terms.values())
    assert found.peak_bytes == pytest.approx(sum(found.terms.values()))
    assert (found.low_bytes < found.peak_bytes).all()
    assert (found.peak_bytes < found.high_bytes).all()
    assert found.fits_probability(found.peak_bytes[0])[0] == pytest.approx(0.5)


def test_software_without_a_profile_names_those_that_have_one():
    assert memory_profile("nemo:25.09").name == "megatron"
    with pytest.raises(JobError, match="nanotron"):
        memory_profile("nanotrom")
