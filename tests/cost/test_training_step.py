"""Prices of training steps: laws that hold for every plan, and published steps."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cost.collectives import hierarchical_wire_bytes, wire_bytes
from phalanx.cost.model_shape import AttentionShape, FeedForwardShape, LayerShape, ModelShape
from phalanx.cost.training_plans import CONTEXT_KINDS, RECOMPUTE, SCHEDULES, TrainingPlans
from phalanx.cost.training_step import training_step
from phalanx.cost.training_traffic import Held, collective, traffic_of
from phalanx.hardware import Figure, read_machine

NONE, SELECTIVE, FULL = range(len(RECOMPUTE))


def gpt(layers=24, hidden=2048, heads=16, vocab=51200, **feed_forward):
    attention = AttentionShape(num_heads=heads, num_kv_heads=heads, head_dim=hidden // heads)
    block = FeedForwardShape(**({"width": 4 * hidden, "is_gated": False} | feed_forward))
    layer = LayerShape(count=layers, attention=attention, feed_forward=block)
    return ModelShape(name="gpt", hidden=hidden, vocab=vocab, layers=(layer,), tied_head=True)


def mixture(experts=16):
    return gpt(width=0, is_gated=True, num_experts=experts, num_active=2, expert_width=1024)


def price(shape=None, machine="h100", **columns):
    device = read_machine(machine) if isinstance(machine, str) else machine
    plans = TrainingPlans(**({"row_tokens": 2048} | columns))
    return training_step(shape or gpt(), plans, device)


def faster(machine, name, factor):
    figure = getattr(machine, name)
    return replace(machine, **{name: Figure(figure.value * factor, *_rest(figure))})


def _rest(figure):
    return figure.kind, figure.source, figure.date


degrees = st.sampled_from([1, 2, 4, 8])
columns = st.fixed_dictionaries(
    {
        "tensor": degrees,
        "pipeline": st.sampled_from([1, 2, 3, 8]),
        "context": st.sampled_from([1, 2, 4]),
        "data": st.sampled_from([1, 3, 16, 512]),
        "virtual": st.sampled_from([1, 2]),
        "schedule": st.integers(0, len(SCHEDULES) - 1),
        "context_kind": st.integers(0, len(CONTEXT_KINDS) - 1),
        "sequence_parallel": st.integers(0, 1),
        "zero": st.integers(0, 3),
        "shard": st.sampled_from([1, 2, 512]),
        "recompute": st.integers(0, 2),
        "micro_rows": st.integers(1, 5),
        "num_micro": st.sampled_from([1, 7, 64]),
        "row_tokens": st.sampled_from([512, 2048, 5000]),
        "imbalance": st.sampled_from([1.0, 1.7]),
    }
)
softwares = st.sampled_from(["megatron", "torch", "nanotron:25.02", "maxtext", "something else"])


@given(columns, softwares, st.booleans())
def test_parts_are_positive_and_sum_to_the_step(plan, software, has_experts):
    times = price(mixture() if has_experts else gpt(), **plan, software=software)
    assert all((part >= 0).all() and np.isfinite(part).all() for part in times.parts.values())
    assert sum(times.parts.values()) == pytest.approx(times.total_s)
    assert (times.low_s < times.high_s).all()
    assert (times.low_s > 0).all()


@given(columns)
def test_more_data_ranks_leave_a_ranks_compute_as_it_is(plan):
    one, many = (price(**plan | {"data": data, "shard": 1}) for data in (4, 64))
    for name in ("compute", "recompute", "head"):
        assert many.parts[name] == pytest.approx(one.parts[name])


@given(columns, st.sampled_from(["row_tokens", "micro_rows", "num_micro", "imbalance"]))
def test_more_work_takes_longer(plan, name):
    assert price(**plan | {name: 2 * plan[name]}).total_s > price(**plan).total_s


@given(columns, st.integers(8, 40))
def test_more_layers_take_longer(plan, layers):
    few, more = (price(gpt(layers=count), **plan).total_s for count in (layers, layers + 1))
    assert more >= few * (1 - 1e-12)


@given(
    columns,
    st.sampled_from(["matmul", "memory_bandwidth", "link_bandwidth", "network_bandwidth"]),
)
def test_faster_parts_never_slow_a_step(plan, name):
    machine = read_machine("h100")
    slow, fast = (price(machine=each, **plan) for each in (machine, faster(machine, name, 2)))
    assert (fast.total_s <= slow.total_s * (1 + 1e-12)).all()


def test_a_table_is_priced_as_its_rows():
    table = {"tensor": [1, 2, 8], "pipeline": [4, 1, 2], "zero": [1, 3, 0], "num_micro": [8, 3, 5]}
    whole = price(**{name: np.array(each) for name, each in table.items()}).total_s
    for at in range(3):
        row = {name: each[at] for name, each in table.items()}
        assert price(**row).total_s[0] == pytest.approx(whole[at])


def test_full_recomputation_repeats_the_forward_pass_of_layers():
    none, full = (price(recompute=kind, micro_rows=8) for kind in (NONE, FULL))
    repeated = full.parts["recompute"] / none.parts["compute"]
    assert 0.3 < repeated[0] < 0.4  # a third of products, less of attention
    assert none.parts["recompute"] == 0


def test_frozen_weights_cost_no_weight_gradients():
    large = {"shape": gpt(4, 8192, 64), "micro_rows": 8}
    full = price(**large, method="full")
    lora = price(**large, method="lora", lora_rank=16)
    assert 0.6 < (lora.parts["compute"] / full.parts["compute"])[0] < 0.95
    assert lora.parts["optimizer"] < full.parts["optimizer"] / 20


def test_windows_shorten_attention_and_documents_too():
    shape = gpt()
    layer = shape.layers[0]
    windowed = replace(layer, attention=replace(layer.attention, window=1024))
    local = replace(shape, layers=(windowed,))
    long = {"row_tokens": 65536}
    whole, near = price(shape, **long), price(local, **long)
    packed = price(shape, **long, document_tokens=2048)
    assert near.total_s < whole.total_s / 2
    assert packed.parts["compute"] == pytest.approx(near.parts["compute"], rel=0.05)


def test_uneven_expert_load_slows_the_busiest_rank():
    even, busy = (
        price(mixture(), data=16, expert=8, micro_rows=8, expert_imbalance=load)
        for load in (1.0, 1.5)
    )
    for name in ("compute", "expert"):
        assert busy.parts[name] > even.parts[name]


def test_head_counts_trained_tokens_only():
    all_tokens, some = (price(pipeline=24, counted_frac=share) for share in (1.0, 0.1))
    assert some.parts["head"] < 0.3 * all_tokens.parts["head"]


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
@pytest.mark.parametrize(("n", "stride"), [(1, 1), (4, 2), (8, 1), (32, 1), (6, 8), (16, 4)])
def test_wire_bytes_equal_those_of_the_collectives(kind, n, stride):
    wire = collective(kind, 1e6, n, stride, 8)
    inside = min(max(8 // stride, 1), n)
    near, far = hierarchical_wire_bytes(kind, 1e6, -(-n // inside), inside)
    assert (wire.near_bytes, wire.far_bytes) == pytest.approx((near, far))
    if n * stride <= 8:
        assert (wire.near_bytes, wire.far_bytes) == pytest.approx((wire_bytes(kind, 1e6, n), 0))


def test_interleaving_divides_the_bubble():
    plan = {"pipeline": 4, "num_micro": 8, "schedule": SCHEDULES.index("interleaved")}
    one, three = (price(**plan, virtual=chunks).parts["bubble"][0] for chunks in (1, 3))
    assert three == pytest.approx(one / 3, rel=0.02)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "plan", "full_s", "selective_s"),
    [
        (48, 6144, 64, {"micro_rows": 4}, 1.42, 1.10),
        (96, 12288, 96, {"pipeline": 8, "virtual": 3, "num_micro": 64}, 18.13, 13.75),
    ],
)
def test_iterations_of_gpt_on_a100(layers, hidden, heads, plan, full_s, selective_s):
    # arXiv 2205.05198, table 5; within the bar of dense models, which is of other rows
    shape = gpt(layers, hidden, heads)
    both = plan | {"tensor": 8, "software": "megatron:22.05", "precision": "fp16"}
    both |= {"schedule": SCHEDULES.index("interleaved"), "machine": "a100-80g"}
    full = price(shape, **both, recompute=FULL).total_s[0]
    selective = price(shape, **both, recompute=SELECTIVE, sequence_parallel=1).total_s[0]
    assert full == pytest.approx(full_s, rel=0.15)
    assert selective == pytest.approx(selective_s, rel=0.15)
    assert full / selective == pytest.approx(full_s / selective_s, rel=0.08)


@pytest.mark.parametrize(
    ("software", "kind", "times"),
    [("phalanx", "ring", 3), ("megatron", "ring", 2), ("phalanx", "all-gather", 2)],
)
def test_a_ring_with_float32_gradients_sends_three_times_the_keys_on_its_way_back(
    software, kind, times
):
    plans = TrainingPlans(
        context=4, context_kind=CONTEXT_KINDS.index(kind), row_tokens=4096, software=software
    )
    sent = traffic_of(gpt(), plans, 8, Held(0.0, 0.0), Held(0.0, 0.0))
    assert sent.context_backward.near_bytes == pytest.approx(times * sent.context.near_bytes)
