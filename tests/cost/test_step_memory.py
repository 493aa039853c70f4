"""Bytes of a rank by the formula that predicts real runs: by hand, and of a published run."""

import pytest

from phalanx.cost.local_shapes import local_config
from phalanx.cost.step_memory import memory_terms, units_of
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


@pytest.mark.parametrize(
    ("items", "always"), [(1.0, False), (1.0, True), (3.0, False), (3.0, True)]
)
def test_whole_gradients_are_those_of_one_unit_unless_micro_batches_wait(items, always):
    """Shards of float32 gradients, and beside them bfloat16 gradients on their way to them."""
    fsdp, mesh = build("data", {"name": "fsdp", "reduce_every_item": always}), Mesh(shard=2)
    step = work(items=items)
    units = units_of(CONFIG, step, [fsdp], mesh, 4)
    trained = [u.num_trained for u in units]
    shards = 4 * sum(u.trained for u in units)
    waits = items > 1 and not always
    beside = (2 + 4) * (sum(trained) if waits else max(trained))
    assert memory_terms(CONFIG, step, units)["gradients"] == pytest.approx(shards + beside)


def test_replicas_keep_whole_gradients():
    step = work(items=3.0)
    units = units_of(CONFIG, step, [build("data", {"name": "replicate"})], Mesh(replicate=2), 4)
    trained = sum(u.num_trained for u in units)
    assert memory_terms(CONFIG, step, units)["gradients"] == trained * (2 + 4 + 4)
