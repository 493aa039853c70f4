"""Predictions of a training step: sizes by hand, and each term's law."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phalanx.cost.local_shapes import local_config
from phalanx.cost.step_saved import saved_bytes_per_token
from phalanx.cost.training import (
    Workload,
    counted_weight,
    predict,
    rate_key,
    row_tokens_for,
    workload_of,
)
from phalanx.data.samples import Sample, Samples
from phalanx.mesh import Mesh
from phalanx.models.operators import operators
from phalanx.models.spec import LoraSpec, canonical_tensors, lora_tensors, small_config
from phalanx.policies.data.fsdp import Fsdp
from phalanx.policies.data.replicate import Replicate
from phalanx.policies.tensor.megatron import Megatron

CONFIG = small_config(
    vocab_size=101,
    hidden_size=12,
    intermediate_size=20,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=6,
    dtype="bfloat16",
)
LORA = LoraSpec(rank=3, alpha=6.0)
RATE_S = 1e-3


def samples(lengths):
    made = []
    for key, length in enumerate(lengths):
        counted = np.arange(length) >= length - 2
        made.append(Sample(np.zeros(length, dtype=np.int32), counted, key))
    return Samples.of(made)


def work(lora=None, held_out=None, **changes):
    dealt = workload_of(
        samples([7, 9, 4, 12, 8, 5, 6, 11] * 4),
        CONFIG,
        num_steps=3,
        global_batch_tokens=60,
        row_tokens=20,
        num_ranks=2,
        lora=lora,
        held_out=held_out,
    )
    return Workload(**(vars(dealt) | changes))


def rates(lora=None, **changes):
    listed = operators(CONFIG, document_tokens=8, lora=lora)
    table = {f"{rate_key(op, CONFIG)}.{phase}": RATE_S for op in listed for phase in "FB"}
    table |= {"all_gather": 1e6, "reduce_scatter": 1e6, "all_reduce": 1e6, "optimizer": 0.0}
    table |= {"add": 1e30, "add.wide": 1e30, "copy": 1e30}
    table |= {"runtime": 0.0, "kernels": 0.0} | changes
    return {key: {"value": value} for key, value in table.items()}


def test_rows_of_evaluations_are_shapes_but_keep_no_activations():
    """Held-out documents of 18 tokens make longer rows than training has."""
    alone, beside = work(), work(held_out=samples([18] * 4))
    assert alone.longest_row < 18 <= max(beside.row_lengths)
    assert beside.longest_row == alone.longest_row


def test_workload_describes_the_dealt_rows():
    dealt = work()
    assert dealt.num_items == 2 and dealt.longest_row <= 20
    assert 25 <= dealt.tokens <= 30 and dealt.row_tokens == round(dealt.tokens / 2)
    assert max(dealt.row_lengths) == dealt.longest_row
    assert set(dealt.document_lengths) <= {4, 5, 6, 7, 8, 9, 11, 12}
    assert set(dealt.target_counts) <= {2, 4, 6, 8}
    assert dealt.num_trained == sum(s.num_elements for s in canonical_tensors(CONFIG).values())
    lora = work(LORA)
    assert lora.num_trained == sum(s.num_elements for s in lora_tensors(CONFIG, LORA).values())
    assert lora.lora == LORA


def test_filler_counts_as_tokens():
    dealt = work()
    rounded = workload_of(
        samples([7, 9, 4, 12, 8, 5, 6, 11] * 4),
        CONFIG,
        num_steps=3,
        global_batch_tokens=60,
        row_tokens=20,
        num_ranks=2,
        multiple=8,
    )
    assert all(length % 8 == 0 for length in rounded.row_lengths)
    assert rounded.tokens > dealt.tokens


def test_seconds_are_tokens_times_rates():
    step = work(LORA)
    found = predict(CONFIG, step, [Replicate()], rates(LORA), mesh=Mesh(replicate=1))
    layers, norms, linears = CONFIG.num_layers, 6, 7
    assert found.seconds["norm"] == pytest.approx((layers * norms + 1) * step.tokens * 2 * RATE_S)
    assert found.seconds["linear"] == pytest.approx(layers * linears * step.tokens * 2 * RATE_S)
    assert found.seconds["head"] == pytest.approx(step.counted * 2 * RATE_S)
    assert found.step_s == pytest.approx(sum(found.seconds.values()))


@pytest.mark.parametrize(
    ("spec", "lora", "gathers"),
    [
        (Fsdp(reshard_after_forward=False), None, "all once"),
        (Fsdp(), None, "layers twice an item"),
        (Fsdp(reshard_after_forward=False), LORA, "adapters once"),
        (Fsdp(), LORA, "frozen layers twice an item"),
    ],
)
def test_gathered_bytes_follow_what_is_kept(spec, lora, gathers):
    step = work(lora)
    layers = {n: s for n, s in canonical_tensors(CONFIG).items() if ".layers." in n}
    root = {n: s for n, s in canonical_tensors(CONFIG).items() if n not in layers}
    adapters = lora_tensors(CONFIG, LORA)

    def padded(tensors):
        rows = (-(-s.shape[0] // 2) * 2 * s.num_elements // s.shape[0] for s in tensors.values())
        return 2 * sum(rows)  # bfloat16

    expected = {
        "all once": padded(layers) + padded(root),
        "layers twice an item": 2 * step.num_items * padded(layers) + padded(root),
        "adapters once": padded(adapters),
        "frozen layers twice an item": 2 * step.num_items * padded(layers) + padded(adapters),
    }[gathers]
    found = predict(CONFIG, step, [spec], rates(lora), mesh=Mesh(shard=2))
    assert found.seconds["gather"] == pytest.approx(expected / 1e6)


def test_bytes_of_a_rank_by_hand():
    step = work(LORA)
    specs = [Fsdp(reshard_after_forward=False)]
    found = predict(CONFIG, step, specs, rates(LORA, kernels=7.0), mesh=Mesh(shard=2))
    base = canonical_tensors(CONFIG).values()
    adapters = lora_tensors(CONFIG, LORA).values()

    def shard(tensors):
        return sum(-(-s.shape[0] // 2) * s.num_elements // s.shape[0] for s in tensors)

    terms = found.terms
    assert terms["weights"] == 2 * shard(base) + 4 * shard(adapters)
    assert terms["gathered"] == 2 * 2 * (shard(base) + shard(adapters))
    assert terms["optimizer"] == 8 * shard(adapters)
    listed = operators(CONFIG, document_tokens=step.document_tokens, lora=LORA)
    saved = sum(op.saved_bytes_per_token for op in listed if op.op != "head")
    assert terms["activations"] == step.longest_row * saved
    assert found.peak_bytes == 2 * sum(terms.values()) and terms["kernels"] == 7.0


def test_resharding_needs_less_memory_and_more_time():
    # two units and a buffer are gathered in turn, so of three layers all might as well be kept
    step, deep = work(num_items=2), replace(CONFIG, layer_kinds=2 * CONFIG.layer_kinds)
    kept = predict(deep, step, [Fsdp(reshard_after_forward=False)], rates(), mesh=Mesh(shard=4))
    given_back = predict(deep, step, [Fsdp()], rates(), mesh=Mesh(shard=4))
    assert given_back.peak_bytes < kept.peak_bytes and given_back.step_s > kept.step_s


def test_head_weighs_its_products_against_the_layers():
    matrices = [s for n, s in canonical_tensors(CONFIG).items() if ".layers." in n]
    layers = sum(s.num_elements for s in matrices if len(s.shape) == 2)
    assert counted_weight(CONFIG) == pytest.approx(101 * 12 / layers)


def test_rows_of_a_report_start_with_the_totals():
    rows = predict(CONFIG, work(), [Fsdp()], rates(), mesh=Mesh(shard=2)).rows()
    assert [row["quantity"] for row in rows[:2]] == ["training/step time", "training/peak memory"]
    assert {row["source"] for row in rows} == {"formula"}


def test_a_tensor_axis_divides_products_and_pays_for_exchanges():
    whole, halves = work(LORA), work(LORA, tensor_degree=2)
    config = local_config(CONFIG, 2)
    local_rates = rates(LORA) | {
        f"{rate_key(op, config)}.{phase}": {"value": RATE_S / 2}
        for op in operators(config, document_tokens=8, lora=LORA)
        for phase in "FB"
        if op.op == "linear"
    }
    for op in operators(config, document_tokens=8, lora=LORA):
        for phase in "FB":
            local_rates.setdefault(f"{rate_key(op, config)}.{phase}", {"value": RATE_S})
    one = predict(CONFIG, whole, [], rates(LORA), mesh=Mesh(tp=1))
    two = predict(CONFIG, halves, [Megatron()], local_rates, mesh=Mesh(tp=2))
    assert two.seconds["linear"] == pytest.approx(one.seconds["linear"] / 2)
    # two blocks a layer, forward and backward, and the embedding's sum and the head's gradient
    exchanges = 4 * CONFIG.num_layers + 2
    row_bytes = whole.tokens * CONFIG.hidden_size * 2
    assert two.seconds["exchange"] == pytest.approx(exchanges * row_bytes / 1e6)
    assert two.terms["weights"] < 0.7 * one.terms["weights"]
    assert two.terms["activations"] < one.terms["activations"]
    again = predict(
        CONFIG, halves, [Megatron()], local_rates, mesh=Mesh(tp=2), recompute="full"
    ).seconds["exchange"]
    assert again == pytest.approx((exchanges + 2 * CONFIG.num_layers) * row_bytes / 1e6)


def test_tokens_shared_between_blocks_keep_less():
    kept = work(LORA, tensor_degree=2)
    shared = work(LORA, tensor_degree=2, splits_tokens=True)
    config = local_config(CONFIG, 2)
    both = [saved_bytes_per_token(config, each, "none") for each in (kept, shared)]
    assert both[1] < both[0]


def test_replicas_of_shards_reduce_twice():
    step = work(LORA)
    flat = predict(CONFIG, step, [Fsdp()], rates(LORA), mesh=Mesh(shard=2))
    both = predict(
        CONFIG, step, [Fsdp(), Replicate()], rates(LORA), mesh=Mesh(replicate=2, shard=2)
    )
    held = flat.terms["optimizer"] / 8
    assert both.terms == flat.terms
    assert both.seconds["reduce"] - flat.seconds["reduce"] == pytest.approx(4 * held / 1e6)


@pytest.mark.parametrize("lora", [None, LORA])
def test_recomputation_trades_time_for_memory(lora):
    step = work(lora)
    found = {
        mode: predict(CONFIG, step, [Fsdp()], rates(lora), mesh=Mesh(shard=2), recompute=mode)
        for mode in ("none", "selective", "full")
    }
    kept = [found[mode].terms["activations"] for mode in found]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == 3
    seconds = [found[mode].step_s for mode in found]
    assert seconds == sorted(seconds) and len(set(seconds)) == 3
    assert "recompute" not in found["none"].seconds
    # full repeats the forward pass of every layer
    listed = operators(CONFIG, document_tokens=step.document_tokens, lora=lora)
    inside = sum(op.layer is not None for op in listed)
    assert found["full"].seconds["recompute"] == pytest.approx(inside * step.tokens * RATE_S)


def test_rows_are_as_long_as_the_longest_document_and_at_least_512():
    assert row_tokens_for(100, 32) == 512
    assert row_tokens_for(513, 32) == 544
    assert row_tokens_for(1000, 1) == 1000
