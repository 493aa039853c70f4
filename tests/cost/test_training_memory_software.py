"""What programs keep: stages, precisions, schedules; peaks that were published."""

import numpy as np
import pytest

from phalanx.cost.memory_activations import chunks_in_flight, chunks_waiting, output_bytes
from phalanx.cost.memory_software import memory_profile, memory_software_names
from phalanx.cost.memory_stages import even_stages, stages_by_cost
from phalanx.cost.model_shape import (
    AttentionShape,
    FeedForwardShape,
    LayerShape,
    ModelShape,
    shape_of,
)
from phalanx.cost.step_memory import memory_terms, units_of
from phalanx.cost.step_work import Workload
from phalanx.cost.training_memory import training_memory
from phalanx.cost.training_plans import RECOMPUTE, SCHEDULES, TrainingPlans
from phalanx.mesh import Mesh
from phalanx.models.known import known_names, known_shape
from phalanx.models.named import named_model
from phalanx.models.spec import LoraSpec
from phalanx.registry import build

LLAMA_8B = named_model("llama-3.1-8b").config
LLAMA_405B = shape_of(named_model("llama-3.1-405b").config)
GIB = 2**30


def llama(layers, hidden, heads, kv_heads, width, vocab, *, tied=False, head_dim=0):
    attention = AttentionShape(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim or hidden // heads
    )
    layer = LayerShape(
        count=layers, attention=attention, feed_forward=FeedForwardShape(width=width)
    )
    return ModelShape(name="llama", hidden=hidden, vocab=vocab, layers=(layer,), tied_head=tied)


def test_blocks_are_dealt_by_cost_and_the_head_takes_the_place_of_layers():
    """A head of 131072 x 2048 costs four layers of 67.1M: 20 units on 2, 4, 8 ranks, by hand."""
    shape = llama(16, 2048, 32, 32, 8192, 131072, tied=True)
    found = stages_by_cost(shape, np.array([1, 2, 4, 8, 16, 32]))
    assert found.first.layers.tolist() == [16, 11, 6, 3, 2, 1]
    assert found.head.rank.tolist() == [0, 1, 3, 6, 12, 17]
    assert found.head.layers.tolist() == [16, 5, 0, 0, 0, 0]
    assert found.all_busy.tolist() == [True] * 4 + [False] * 2


def test_a_pipeline_rank_without_layers_never_fits():
    shape = llama(16, 2048, 32, 32, 8192, 131072, tied=True)
    plans = TrainingPlans(
        pipeline=np.array([8, 16]), num_micro=16, row_tokens=64, software="nanotron"
    )
    assert (training_memory(shape, plans).fits_probability(1e15) == [1.0, 0.0]).all()


def test_126_layers_leave_one_less_on_the_ends_of_16_ranks():
    found = even_stages(126, np.array([16]), np.array([8]))
    assert (found.first.layers, found.second.layers, found.head.layers) == (7, 8, 7)


def test_chunks_in_flight_of_schedules():
    """p = 4, v = 2, 12 micro-batches, ranks 0 and 3; interleaved: 11 and 5 chunks of half a
    stage."""
    expected = {
        "gpipe": (12, 12), "1f1b": (4, 1), "interleaved": (5.5, 2.5), "zero-bubble": (4, 4),
        "zbv": (4, 4), "dualpipe": (5, 5), "dualpipe-v": (4.5, 4.5), "hanayo": (2.5, 4),
    }  # fmt: skip
    for name, held in expected.items():
        found = [
            chunks_in_flight(
                *(np.array([each]) for each in (SCHEDULES.index(name), 4, rank, 2, 12))
            )
            for rank in (0, 3)
        ]
        assert tuple(float(each[0]) for each in found) == held, name


def test_experts_stand_where_the_model_has_them():
    """One dense layer, then three with experts, on two ranks: the last has two of the three."""
    attention = AttentionShape(num_heads=8, num_kv_heads=8, head_dim=128)
    dense = LayerShape(count=1, attention=attention, feed_forward=FeedForwardShape(width=4096))
    experts = FeedForwardShape(num_experts=64, num_active=4, expert_width=2048)
    mixed = LayerShape(count=3, attention=attention, feed_forward=experts)
    shape = ModelShape(name="moe", hidden=1024, vocab=1000, layers=(dense, mixed))
    found = training_memory(shape, TrainingPlans(pipeline=2, num_micro=4, row_tokens=8))
    in_experts = 2 * 64 * 3 * 1024 * 2048
    assert found.terms["gradients"].item() / 4 == pytest.approx(in_experts, rel=0.02)


def test_quantised_weights_take_half_a_byte_and_only_adapters_have_moments():
    shape = shape_of(LLAMA_8B)
    plans = TrainingPlans(row_tokens=64, method="lora", lora_rank=16, base_bits=4, software="torch")
    terms = training_memory(shape, plans).terms
    rank_16 = 32 * 16 * (2 * 8192 + 2 * 5120 + 3 * (4096 + 14336))
    assert terms["moments"].item() == 8 * rank_16
    assert terms["weights"].item() - 4 * rank_16 == pytest.approx(8.03e9 * 4.127 / 8, rel=0.001)


def test_one_rank_without_shards_holds_every_parameter_of_every_known_model():
    for name in known_names():
        shape = known_shape(name)
        weights = training_memory(shape, TrainingPlans(row_tokens=1)).terms["weights"].item()
        assert weights == pytest.approx(2 * shape.num_params, rel=1e-9), name


def test_offloaded_moments_are_in_the_host():
    shape = llama(8, 1024, 8, 8, 4096, 1000)
    plans = TrainingPlans(row_tokens=64, offload=np.array([0.0, 0.5, 1.0]))
    found = training_memory(shape, plans)
    assert found.terms["moments"] + found.host_bytes == pytest.approx(12 * shape.num_params)
    assert found.terms["moments"][2] == 0


@pytest.mark.parametrize(
    "layers, tensor, context, tokens, gibibytes",
    [
        (12, 2, 4, 32768, 68.43),
        (12, 1, 8, 32768, 104.51),
        (12, 2, 4, 131072, 112.67),
        (12, 1, 8, 131072, 147.99),
    ],
)
def test_peaks_that_simumax_measured_of_megatron(layers, tensor, context, tokens, gibibytes):
    """Layer-reduced Llama 3 70B on 8 B200, max allocated; SimuMax v1.2 release summary."""
    plans = TrainingPlans(
        tensor=tensor, context=context, shard=context, zero=1, num_micro=4, row_tokens=tokens,
        sequence_parallel=int(tensor > 1),
    )  # fmt: skip
    shape = llama(layers, 8192, 64, 8, 28672, 128256)
    found = training_memory(shape, plans).logged_bytes.item()
    assert found / GIB == pytest.approx(gibibytes, rel=0.05)


@pytest.mark.parametrize("data, gigabytes", [(4, 58.817), (16, 52.484), (64, 50.901)])
def test_peaks_of_405b_in_fp8_on_h100(data, gigabytes):
    """MLPerf Training 5.0, NVIDIA eos: tensor 8, pipeline 8 x 8, context 2."""
    plans = TrainingPlans(
        tensor=8, pipeline=8, virtual=8, schedule=2, context=2, data=data, shard=2 * data, zero=1,
        num_micro=48, row_tokens=8192, sequence_parallel=1, precision="fp8",
    )  # fmt: skip
    found = training_memory(LLAMA_405B, plans).logged_bytes.item()
    assert found / 1e9 == pytest.approx(gigabytes, rel=0.06)


@pytest.mark.parametrize("context, gigabytes", [(1, 168.827), (8, 82.319)])
def test_peaks_of_lora_on_70b_in_fp8_on_b200(context, gigabytes):
    """MLPerf Training 5.0, llama2_70b_lora of NVIDIA (nyx) and Oracle: rank 16, 8192 tokens."""
    plans = TrainingPlans(
        context=context, data=8, shard=8 * context, zero=1, row_tokens=8192, precision="fp8",
        method="lora", lora_rank=16,
    )  # fmt: skip
    shape = llama(80, 8192, 64, 8, 28672, 32000)
    found = training_memory(shape, plans).logged_bytes.item()
    assert found / 1e9 == pytest.approx(gigabytes, rel=0.03)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-8b", "gemma-4-31b"])
def test_our_trainer_keeps_what_its_own_formula_counts(name, rank, recompute):
    """`step_memory` counts tensors moment by moment and is held against real runs; the formula of
    clusters sums every term at its most, so it may lie above, never far below."""
    config, tokens = named_model(name).config, 4096
    lora = LoraSpec(rank=rank, alpha=16.0) if rank else None
    work = Workload(
        tokens=2 * tokens, counted=2 * tokens, num_items=2, row_tokens=tokens, row_counted=tokens,
        longest_row=tokens, document_tokens=tokens, num_trained=1, tensor_degree=1,
        splits_tokens=False, lora_rank=rank, lora_alpha=16.0,
        lora_targets=lora.targets if lora else (),
    )  # fmt: skip
    fsdp = build("data", {"name": "fsdp", "reduce_every_item": True})
    units = units_of(config, work, [fsdp], Mesh(shard=8), 4)
    plans = TrainingPlans(
        data=8, shard=8, zero=3, num_micro=2, row_tokens=tokens, lora_rank=rank,
        recompute=RECOMPUTE.index(recompute), method="lora" if rank else "full",
        software="phalanx",
    )  # fmt: skip
    found = training_memory(shape_of(config), plans).logged_bytes.item()
    counted = sum(memory_terms(config, work, units, recompute=recompute).values())
    assert 0.92 * counted < found < 1.11 * counted


@pytest.mark.parametrize("name", memory_software_names())
def test_a_profile_says_where_its_figures_come_from(name):
    profile = memory_profile(name)
    assert profile.source in profile.describe()
    assert all(hasattr(profile, each) for each in profile.fitted)
    assert bool(profile.fitted) == bool(profile.fitted_rows)


@pytest.mark.parametrize(("window", "seen"), [(0, 7 * 1024), (257, 512), (100_000, 7 * 1024)])
def test_gathered_keys_are_kept_by_every_layer_where_our_attention_keeps_them(window, seen):
    """8 context ranks of 1,024 tokens, 4 key heads of 64, 6 layers: by hand."""
    attention = AttentionShape(num_heads=16, num_kv_heads=4, head_dim=64, window=window)
    layer = LayerShape(count=6, attention=attention, feed_forward=FeedForwardShape(width=2048))
    shape = ModelShape(name="windowed", hidden=1024, vocab=1000, layers=(layer,))

    def activations(software, kind, recompute="none"):
        plans = TrainingPlans(
            context=8, context_kind=kind, row_tokens=8192, software=software,
            recompute=RECOMPUTE.index(recompute),
        )  # fmt: skip
        return training_memory(shape, plans).terms["activations"].item()

    gathered = 2 * seen * 2 * 4 * 64  # of a layer
    ours = [activations("phalanx", kind) for kind in (0, 1)]
    assert ours[0] - ours[1] == pytest.approx(6 * gathered)
    again = [activations("phalanx", kind, "full") for kind in (0, 1)]
    assert again[0] - again[1] == pytest.approx(gathered)
    assert activations("megatron", 0) == activations("megatron", 1)


@pytest.mark.parametrize(
    ("schedule", "policy", "per_rank"),
    [("zero-bubble", "zero_bubble", 1), ("zbv", "zbv", 2), ("dualpipe-v", "dualpipe_v", 2)],
)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_waiting_weight_gradients_are_those_of_the_lists_at_their_peak(
    schedule, policy, per_rank, ranks
):
    """Of first, second and last rank; a waiting stage takes two thirds of one that is kept."""
    for rank in {0, 1, ranks - 1}:
        kept = waiting = 0
        peak = (0.0, 0)
        for each in build("pipeline", policy).order(ranks, 4 * ranks)[rank]:
            parts = each.stage > 0  # the first stage does all in its second pass
            kept += {"F": 1, "I": 0}.get(each.kind, -1)
            waiting += parts * {"I": 1, "W": -1}.get(each.kind, 0)
            peak = max(peak, (kept + 0.65 * waiting, waiting))
        place = [np.array([each]) for each in (SCHEDULES.index(schedule), ranks, rank, 4 * ranks)]
        found = chunks_waiting(*place).item() * per_rank
        assert found == pytest.approx(peak[1], abs=0.5 if per_rank == 2 else 0)


def test_outputs_that_wait_are_those_of_trained_operators_by_hand():
    """A Llama 3 8B layer: q 4096, k and v 1024 each, gate and up 14336 each; o, down, two norms."""
    layer = llama(1, 4096, 32, 8, 14336, 1000).layers
    inner, stream = 4096 + 2 * 1024 + 2 * 14336, 2 * 4096
    whole = output_bytes(layer, 4096)
    assert (whole.inner, whole.stream) == (2 * inner, 2 * (stream + 2 * 4096))
    tuned = output_bytes(layer, 4096, "all")
    assert (tuned.inner, tuned.stream) == (2 * inner, 2 * stream)
    attention = output_bytes(layer, 4096, "attention")
    assert (attention.inner, attention.stream) == (2 * (4096 + 2 * 1024), 2 * 4096)


def test_a_parted_backward_pass_takes_more_on_the_last_rank_of_our_trainer_alone():
    shape = llama(32, 4096, 32, 8, 14336, 128256)
    more = {}
    for software in ("phalanx", "megatron"):
        peaks = [
            training_memory(
                shape,
                TrainingPlans(
                    pipeline=4, num_micro=16, row_tokens=4096, software=software,
                    schedule=SCHEDULES.index(schedule),
                ),
            ).terms["activations"].item()
            for schedule in ("1f1b", "zero-bubble")
        ]  # fmt: skip
        more[software] = peaks[1] / peaks[0]
    assert more["phalanx"] > 1.3 and more["megatron"] == pytest.approx(1.0)
