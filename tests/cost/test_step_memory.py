"""Bytes of a rank by the formula that predicts real runs: by hand, and of a published run."""

from dataclasses import replace

import pytest

from phalanx.cost.local_shapes import local_config
from phalanx.cost.step_memory import memory_terms, units_of
from phalanx.cost.step_saved import saved_bytes_per_token
from phalanx.cost.step_work import Workload
from phalanx.mesh import Mesh
from phalanx.models.named import named_model
from phalanx.models.spec import LoraSpec, small_config
from phalanx.registry import build

CONFIG = small_config(
    vocab_size=101, hidden_size=12, intermediate_size=20, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=6, dtype="bfloat16",
)  # fmt: skip
GEMMA = named_model("gemma-4-31b").config
LORA = LoraSpec(rank=64, alpha=64.0)
TOKENS = 3072


def work(*, tokens=10, items=1.0, tensor=1, lora=None, splits=False):
    return Workload(
        tokens=items * tokens, counted=items * tokens, num_items=items, row_tokens=tokens,
        row_counted=tokens, longest_row=tokens, document_tokens=tokens, num_trained=1,
        tensor_degree=tensor, splits_tokens=splits, lora_rank=lora.rank if lora else 0,
        lora_alpha=lora.alpha if lora else 0.0, lora_targets=lora.targets if lora else (),
    )  # fmt: skip


def test_gathers_of_a_published_run():
    """LoRA of 31B on two GPUs receives half of the layers' 58.6 GB twice a micro-batch."""
    fsdp, mesh = build("data", {"name": "fsdp"}), Mesh(shard=2)
    step = work(tokens=TOKENS, items=4.0, lora=LORA)
    units = units_of(GEMMA, step, [fsdp], mesh, 4)
    frozen = sum(u.gathers(4.0) * u.gathered for u in units if not u.num_trained)
    assert frozen / 2 == pytest.approx(4 * 2 * 29.29e9, rel=0.001)


def test_weights_and_saved_inputs_of_a_published_run():
    """15.35 GB of weights and 1.98 GB of layer inputs on each of four chips (same source)."""
    step = work(tokens=TOKENS, items=8.0, tensor=4, lora=LORA)
    local = local_config(GEMMA, 4)
    units = units_of(local, step, [], Mesh(tp=4), 4)
    terms = memory_terms(local, step, units, recompute="full")
    adapters = sum(u.num_trained for u in units)
    assert terms["weights"] - 4 * adapters == pytest.approx(15.35e9, rel=0.01)
    assert terms["activations"] >= 60 * TOKENS * 5376 * 2 == pytest.approx(1.98e9, rel=0.01)


ROOT, LAYER = 101 * 12 + 12, 1644  # trained elements of a unit: embedding and last norm; a layer
ROOT_HELD = 51 * 12 + 6  # of 2 ranks, rows rounded up
SHARDS = 4 * (ROOT_HELD + 3 * LAYER / 2)  # float32


def at_peak(spec, mesh, *, tokens=1, items=1.0, config=CONFIG):
    """Terms of a rank; one token a row leaves next to nothing to activations."""
    step = work(tokens=tokens, items=items)
    units = units_of(config, step, [build("data", spec)], mesh, 4)
    assert [u.num_trained for u in units] == [ROOT, LAYER, LAYER, LAYER]
    assert [u.is_root for u in units] == [True, False, False, False]
    return memory_terms(config, step, units)


def test_a_layer_is_whole_in_both_dtypes_while_it_is_reduced_and_the_head_waits():
    """bfloat16 gradients, their float32 copy and its shard; the next layer is gathered already."""
    terms = at_peak({"name": "fsdp"}, Mesh(shard=2))
    head = 2 * 101 * 12
    assert terms["gradients"] == head + (2 + 4) * LAYER + 4 * LAYER / 2
    assert terms["gathered"] == 2 * (2 * ROOT_HELD + 2 * LAYER)
    assert terms["gather buffer"] == 2 * LAYER


def test_gradients_that_wait_for_the_last_micro_batch_do_so_whole_in_float32():
    """Beside them the head's, and a layer's own bfloat16 one or its copy and shard."""
    terms = at_peak({"name": "fsdp"}, Mesh(shard=2), items=3.0)
    head = 2 * 101 * 12
    assert terms["gradients"] == 4 * (ROOT + 3 * LAYER) + head + (4 + 4 / 2) * LAYER


def test_gradients_reduced_after_every_micro_batch_wait_as_shards():
    terms = at_peak({"name": "fsdp", "reduce_every_item": True}, Mesh(shard=2), items=3.0)
    assert terms["gradients"] == SHARDS + 2 * 101 * 12 + (2 + 4) * LAYER


def test_a_large_root_is_whole_in_both_dtypes_at_the_end_and_no_longer_gathered():
    large = replace(CONFIG, vocab_size=100_000)
    root, held = 100_000 * 12 + 12, 50_000 * 12 + 6
    step = work(tokens=1)
    units = units_of(large, step, [build("data", {"name": "fsdp"})], Mesh(shard=2), 4)
    terms = memory_terms(large, step, units)
    assert terms["gradients"] == (2 + 4) * root + 4 * held + 4 * 3 * LAYER / 2
    assert terms["gathered"] == terms["activations"] == 0.0


def test_a_tied_matrix_has_two_gradients_while_it_is_still_gathered():
    """In float32 they and the gathered weights are more than one and its copy."""
    deep = small_config(
        vocab_size=1000, hidden_size=12, intermediate_size=20, num_layers=40, num_heads=4,
        num_kv_heads=2, head_dim=6, dtype="float32",
    )  # fmt: skip
    step, root = work(tokens=1), 1000 * 12 + 12
    units = units_of(deep, step, [build("data", {"name": "fsdp"})], Mesh(shard=2), 4)
    terms = memory_terms(deep, step, units)
    assert terms["gradients"] == 4 * root + 4 * 1000 * 12 + 4 * 40 * LAYER / 2
    assert terms["gathered"] == 4 * root


def test_replicas_add_micro_batches_up_in_float32_and_copy_a_layer_to_sum_it():
    """All of them, the head's in bfloat16 and the copy of a layer."""
    terms = at_peak({"name": "replicate"}, Mesh(replicate=2), items=3.0)
    assert terms["gradients"] == 4 * (ROOT + 3 * LAYER) + 2 * 101 * 12 + 4 * LAYER


def test_adapters_that_no_shard_gathers_have_float32_gradients_and_are_kept_cast():
    """Two replicas at the loss: 4 bytes a gradient that waits, 2 of what products keep."""
    step = work(tokens=500, items=3.0, lora=LoraSpec(rank=8, alpha=8.0))
    by_name = {}
    for name, mesh in (("replicate", Mesh(replicate=2)), ("fsdp", Mesh(shard=2))):
        units = units_of(CONFIG, step, [build("data", {"name": name})], mesh, 4)
        by_name[name] = memory_terms(CONFIG, step, units)
    num_trained = sum(u.num_trained for u in units)
    whole, sharded = by_name["replicate"], by_name["fsdp"]
    saved = 500 * saved_bytes_per_token(CONFIG, step, "none")
    assert whole["activations"] == saved + 2 * num_trained and sharded["activations"] == saved
    assert whole["gradients"] == 4 * num_trained
    units = units_of(CONFIG, step, [build("data", "replicate")], Mesh(replicate=2), 2)
    stored_alike = memory_terms(CONFIG, step, units, reduce_bytes=2)
    assert stored_alike["activations"] == saved
    assert stored_alike["gradients"] == 2 * num_trained


def test_the_head_s_gradient_and_its_product_are_whole_beside_activations():
    """With many targets in one chunk and few weights in layers."""
    step = work(tokens=4000)
    spec = build("data", {"name": "fsdp"})
    units = units_of(CONFIG, step, [spec], Mesh(shard=2), 4)
    terms = memory_terms(CONFIG, step, units)
    chunk, rows = 4000 * 101 * 2, 2 * 4000 * 12 * (2 + 4)
    assert terms["logits"] == chunk + rows
    assert terms["gradients"] == (2 + 2) * 101 * 12
    assert terms["gathered"] == 2 * 2 * ROOT_HELD
