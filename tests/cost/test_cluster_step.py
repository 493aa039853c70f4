"""Seconds of a step elsewhere: by hand, and against published traffic."""

import pytest

from phalanx.cost.cluster_step import (
    DeviceRates,
    OperatorGroup,
    exchange_counts,
    operator_groups,
    step_seconds,
)
from phalanx.cost.collectives import hierarchical_s, ring_s
from phalanx.cost.local_shapes import local_config
from phalanx.cost.step_memory import memory_terms, units_of
from phalanx.cost.step_work import Workload
from phalanx.mesh import Mesh
from phalanx.models.named import named_model
from phalanx.models.operators import operators
from phalanx.models.spec import LoraSpec, small_config
from phalanx.registry import build

CONFIG = small_config(
    vocab_size=101, hidden_size=12, intermediate_size=20, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=6, dtype="bfloat16",
)  # fmt: skip
RATES = DeviceRates(
    flops_per_s=1e6, memory_bytes_per_s=1e5, launch_s=1e-4, devices_per_domain=4,
    link_bytes_per_s=1e4, link_latency_s=0.01, network_bytes_per_s=1e3, network_latency_s=0.1,
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


def priced(groups, units=(), specs=(), *, mesh=None, recompute="none", config=CONFIG, **of_work):
    step = work(**of_work)
    return step_seconds(
        config, step, groups, units, specs, RATES, mesh=mesh or Mesh(shard=1), recompute=recompute
    )


def test_an_operator_takes_the_longest_of_its_products_its_bytes_and_one_launch():
    of_flops = OperatorGroup("linear", 2, 1000.0, 2000.0, 10.0, 1.0, True, True, 1.0)
    of_bytes = OperatorGroup("norm", 1, 0.0, 0.0, 0.0, 50.0, True, True, 1.0)
    of_launch = OperatorGroup("add", 1, 0.0, 0.0, 0.0, 0.1, True, True, 1.0)
    step = priced([of_flops, of_bytes, of_launch])
    # 2 x 10 tokens x (1000 + 2000) / 1e6;  10 x 50 x (2 + 4) / 1e5;  two launches
    assert step.bound == pytest.approx({"compute": 0.06, "bandwidth": 0.03, "launches": 2e-4})
    assert step.total_s == pytest.approx(0.0902) and sum(step.shares().values()) == 1.0
    again = priced([of_flops, of_bytes], recompute="full").parts["recompute"]
    assert again == pytest.approx(0.02 + 0.01)
    assert priced([of_flops, of_bytes], recompute="selective").parts["recompute"] == 0.01


def test_micro_batches_and_token_shares_multiply_what_is_computed():
    group = OperatorGroup("linear", 1, 1000.0, 0.0, 0.0, 0.0, True, False, 0.5)
    assert priced([group], items=3.0).parts["compute"] == pytest.approx(3 * 5 * 1000 / 1e6)


def test_collectives_inside_a_domain_between_domains_and_across():
    inside = RATES.collective_s("all_gather", 800.0, 2, stride=2)
    assert inside == ring_s("all_gather", 800.0, 2, 1e4, 0.01) == pytest.approx(0.01 + 0.04)
    apart = RATES.collective_s("all_gather", 800.0, 2, stride=4)
    assert apart == ring_s("all_gather", 800.0, 2, 1e3, 0.1) == pytest.approx(0.1 + 0.4)
    across = RATES.collective_s("all_reduce", 800.0, 8)
    assert across == hierarchical_s(
        "all_reduce", 800.0, 2, 4, node_bytes_per_s=1e4, net_bytes_per_s=1e3,
        node_latency_s=0.01, net_latency_s=0.1,
    )  # fmt: skip
    assert RATES.collective_s("all_gather", 800.0, 1) == 0.0


def test_equal_operators_stand_together_and_none_is_lost():
    for lora in (None, LoraSpec(rank=2, alpha=4.0)):
        step = work(lora=lora)
        listed = operators(CONFIG, document_tokens=10, lora=lora)
        listed = [op for op in listed if op.op != "rope"]
        groups = operator_groups(CONFIG, step)
        assert sum(group.number for group in groups) == len(listed) > 2 * len(groups)
        for name, field in (
            ("flops", "flops_per_token"),
            ("backward_flops", "backward_flops_per_token"),
        ):
            total = sum(group.number * getattr(group, name) for group in groups)
            assert total == pytest.approx(sum(getattr(op, field) for op in listed))


def test_traffic_hides_behind_compute_but_for_the_first_gather():
    fsdp = build("data", {"name": "fsdp"})
    mesh = Mesh(shard=2)
    step = work(items=2.0)
    units = units_of(CONFIG, step, [fsdp], mesh, 4)
    found = priced((), units, [fsdp], mesh=mesh, items=2.0)
    layers = [u for u in units if u.gathers(1.0) == 2.0]
    root = [u for u in units if u.gathers(1.0) == 1.0]
    assert len(layers) == CONFIG.num_layers and len(root) == 1
    each_s = [RATES.collective_s("all_gather", u.gathered, 2) for u in (*layers, *root)]
    assert found.parts["gather"] == pytest.approx(4 * sum(each_s[:-1]) + each_s[-1])
    assert found.first_gather_s == max(each_s)
    assert found.total_s == pytest.approx(found.beside_s + found.first_gather_s)
    slow = OperatorGroup("linear", 1, 1e9, 0.0, 0.0, 0.0, True, False, 1.0)
    hidden = priced([slow], units, [fsdp], mesh=mesh, items=2.0)
    assert hidden.total_s == pytest.approx(hidden.busy_s + found.first_gather_s)


def test_tensor_exchanges_of_a_published_run():
    """Gemma 4 31B with recomputation: 6 x 60 x s x 5376 x 2 B = 11.9 GB (arXiv 2605.25645)."""
    megatron = build("tensor", {"name": "megatron"})
    counts = exchange_counts(GEMMA, [megatron], "full")
    assert counts == {"all_reduce": 6 * 60 + 2}  # and one each for embedding and head
    assert 360 * TOKENS * 5376 * 2 == pytest.approx(11.9e9, rel=0.01)
    plain = exchange_counts(GEMMA, [megatron], "none")
    assert plain == {"all_reduce": 4 * 60 + 2}  # arXiv 1909.08053, section 3
    options = {"name": "megatron", "sequence_parallel": True, "gather_twice": False}
    splits = exchange_counts(GEMMA, [build("tensor", options)], "none")
    assert (
        splits["reduce_scatter"] == 4 * 60 / 1 + 1
    )  # arXiv 2205.05198: the ring's volume is the same
    assert splits["all_gather"] == 4 * 60 + 2


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
    found = priced((), units, [fsdp], mesh=mesh, items=items)
    reduced = sum(RATES.collective_s("reduce_scatter", 4.0 * n, 2) for n in trained if n)
    assert found.parts["reduce"] == pytest.approx(reduced * (items if always else 1.0))


def test_replicas_keep_whole_gradients():
    step = work(items=3.0)
    units = units_of(CONFIG, step, [build("data", {"name": "replicate"})], Mesh(replicate=2), 4)
    trained = sum(u.num_trained for u in units)
    assert memory_terms(CONFIG, step, units)["gradients"] == trained * (2 + 4 + 4)
