"""Rows of strangers become plans: what is implied is derived, what is absent is named."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cost.training_plans import COLUMNS, RECOMPUTE, SCHEDULES
from phalanx.errors import PhalanxError
from phalanx.lab.csv_rows import CsvRow
from phalanx.lab.row_machine import network_bytes_per_s
from phalanx.lab.row_shape import cut
from phalanx.lab.row_software import precision_of, software_of
from phalanx.lab.training_rows import NUMBERS, batches, read_training
from phalanx.models.known import known_shape
from tests.lab.tables import LLAMA_ROW, row, text


def read(tmp_path, *rows):
    path = tmp_path / "rows.csv"
    path.write_text(text(*rows))
    return read_training(path)


def plan(tmp_path, **cells):
    (found,) = read(tmp_path, row(**cells))
    assert not found.missing, found.missing
    return found.plans


def test_degrees_and_micro_batches_follow_from_devices_and_batch(tmp_path):
    (found,) = read(tmp_path, row(tp="2", pp="2", cp="", dp="", n_devices="16"))
    plans = found.plans
    assert (plans.tensor, plans.pipeline, plans.context, plans.data) == (2, 2, 1, 4)
    assert (plans.micro_rows, plans.num_micro) == (1, 4)
    assert found.tokens_per_step == 16 * 8192
    assert plans.devices == 16


@pytest.mark.parametrize(
    ("cells", "degrees"),
    [
        ({"tp": "", "pp": "", "dp": "8"}, (1, 1, 1, 8)),  # all devices are data ranks
        ({"tp": "2", "pp": "1", "dp": "2", "cp": ""}, (2, 1, 2, 2)),  # context is what is left
        ({"tp": "", "pp": "1", "dp": "2", "cp": "1"}, (4, 1, 1, 2)),
        ({"tp": "2", "pp": "", "dp": "2", "cp": ""}, (2, 2, 1, 2)),
    ],
)
def test_the_one_degree_that_is_missing_is_what_devices_leave(tmp_path, cells, degrees):
    plans = plan(tmp_path, **cells)
    assert (plans.tensor, plans.pipeline, plans.context, plans.data) == degrees


@pytest.mark.parametrize(
    ("cells", "missing"),
    [
        ({"tp": "", "pp": ""}, "tp, pp, cp and dp whose product is n_devices"),
        ({"tp": "3"}, "tp, pp, cp and dp whose product is n_devices"),
        ({"tp": "2", "pp": "2", "dp": "3"}, "tp, pp, cp and dp whose product is n_devices"),
        ({"dtype": ""}, "dtype"),
        ({"seq_len_tokens": ""}, "seq_len_tokens"),
        ({"n_devices": ""}, "n_devices"),
        ({"global_batch_seqs": "6"}, "micro_batch_seqs and global_batch_seqs that dp divides"),
        ({"micro_batch_seqs": "3"}, "micro_batch_seqs and global_batch_seqs that dp divides"),
        (
            {"pp": "2", "micro_batch_seqs": ""},
            "micro_batch_seqs and global_batch_seqs that dp divides",
        ),
        ({"vocab": "", "layers": "0"}, "model sizes (layers, vocab)"),
        ({"params_b": "70"}, "model sizes that give 70 billion parameters"),
        ({"hardware": "RTX 2080 + RTX 3090"}, "hardware of one kind"),
        ({"model": "deepseek-v3", "hidden": "", "layers": "", "ep": "64"}, "ep and expert TP"),
    ],
)
def test_what_a_row_lacks_is_named_not_guessed(tmp_path, cells, missing):
    (found,) = read(tmp_path, row(**cells))
    assert any(each.startswith(missing) for each in found.missing)
    assert found.plans is None and found.shape is None and not found.is_fitted


def test_an_unknown_machine_is_no_missing_input(tmp_path):
    (found,) = read(tmp_path, row(hardware="Abacus 9000"))
    assert found.is_complete and found.machine is None and not found.is_fitted


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({"zero_or_fsdp": "FSDP FULL_SHARD"}, (3, 8, 0)),
        ({"zero_or_fsdp": "FSDP SHARD_GRAD_OP"}, (3, 8, 1)),
        ({"zero_or_fsdp": "FSDP2 group 4"}, (3, 4, 0)),
        ({"zero_or_fsdp": "FSDP2 group 5"}, (3, 8, 0)),  # no such group: all ranks
        ({"zero_or_fsdp": "HSDP", "devices_per_node": "4"}, (3, 4, 0)),
        ({"zero_or_fsdp": "distributed optimizer (ZeRO-1)"}, (1, 8, 0)),
        ({"zero_or_fsdp": "ZeRO stage 2"}, (2, 8, 0)),
        ({"zero_or_fsdp": "ZeRO-0"}, (0, 1, 0)),
        ({"zero_or_fsdp": "none", "framework": "torchtitan"}, (0, 1, 0)),
        ({"zero_or_fsdp": "NO_SHARD", "framework": "torchtitan"}, (0, 1, 0)),
        ({"zero_or_fsdp": "n/a", "framework": "torchtitan"}, (3, 8, 0)),
        ({"zero_or_fsdp": "", "framework": "Megatron-DeepSpeed"}, (0, 1, 0)),
        ({"zero_or_fsdp": "", "framework": "Megatron-LM"}, (1, 8, 0)),
        ({"zero_or_fsdp": "", "framework": "Megatron-LM", "source_date": "2021-04"}, (0, 1, 0)),
        (
            {
                "zero_or_fsdp": "FSDP over ICI, DP over slices",
                "interconnect": "ICI 2D torus x4 chips, 2 slice(s) over DCN",
            },
            (3, 4, 0),
        ),
    ],
)
def test_sharding_is_read_from_text_or_from_what_the_framework_does(tmp_path, cells, expected):
    plans = plan(tmp_path, tp="1", **cells)
    assert (plans.zero, plans.shard, plans.keeps_gathered) == expected


@pytest.mark.parametrize(
    ("cells", "has"),
    [
        ({}, True),
        ({"tp": "1"}, False),
        ({"framework": "Megatron-DeepSpeed"}, False),
        ({"source_date": "2021-04"}, False),
        ({"recompute": "full, no sequence parallelism"}, False),
        ({"recompute": "selective + sequence parallelism", "source_date": "2022-05"}, True),
    ],
)
def test_tensor_ranks_split_the_sequence_where_the_framework_does(tmp_path, cells, has):
    assert bool(plan(tmp_path, **cells).sequence_parallel) is has


def test_pipelines_interleave_unasked_where_recipes_do(tmp_path):
    cells = {"pp": "4", "tp": "1", "n_devices": "16", "global_batch_seqs": "32"}  # 8 micro-batches
    rows = read(
        tmp_path,
        row(**cells),  # 32 layers: 8 a rank, of which 4 chunks is the largest up to 6
        row(**cells, schedule="1F1B"),
        row(**cells, vpp="2"),
        row(**cells | {"global_batch_seqs": "24"}),  # 6 micro-batches: no rounds of 4
        row(**cells, framework="Megatron-DeepSpeed"),
        row(**cells | {"model": "gpt-oss-120b", "layers": "", "hidden": ""}),  # 36 layers, experts
    )
    assert [int(each.plans.virtual) for each in rows] == [4, 1, 2, 1, 1, 1]
    names = [SCHEDULES[int(each.plans.schedule)] for each in rows]
    assert names == ["interleaved", "1f1b", "interleaved", "1f1b", "1f1b", "1f1b"]


def test_virtual_stages_mean_an_interleaved_schedule(tmp_path):
    names = [
        SCHEDULES[int(plan(tmp_path, pp="2", tp="1", **cells).schedule)]
        for cells in (
            {"schedule": "1F1B"},
            {"vpp": "4"},
            {"schedule": "DualPipe"},
            {"schedule": "zero bubble"},
        )
    ]
    assert names == ["1f1b", "interleaved", "dualpipe", "zero-bubble"]
    assert plan(tmp_path, pp="1", vpp="4").virtual == 1  # no pipeline, no chunks


def test_recomputation_and_adapters_are_read(tmp_path):
    texts = {"": "none", "none": "none", "full": "full", "norm, act": "selective"}
    for cell, name in texts.items():
        assert plan(tmp_path, recompute=cell).recompute == RECOMPUTE.index(name)
    plans = plan(tmp_path, workload="lora", notes="packed samples, LoRA rank 32")
    assert (plans.method, plans.lora_rank) == ("lora", 32)
    assert plan(tmp_path, workload="sft").method == "full"


@pytest.mark.parametrize(
    ("cell", "name"),
    [
        *(("BF16", "bf16"), ("amp_bf16", "bf16"), ("BF16+FP8 linear", "fp8"), ("MXFP8", "fp8")),
        *(("NVFP4", "fp4"), ("FP16", "fp16"), ("INT8/FP8 quantized", "fp8"), ("", "")),
    ],
)
def test_precision_is_that_of_products(cell, name):
    assert precision_of(CsvRow(2, {"dtype": cell}, {})) == name


@pytest.mark.parametrize(
    ("framework", "date", "name"),
    [
        ("Megatron-Bridge / Megatron-Core", "26.04.01", "megatron:26.04"),
        ("PyTorch NVIDIA Release 25.09", "2025-11", "megatron:25.09"),
        ("torchtitan (PyTorch 2.6 nightly)", "2024-12", "torch:2.6"),
        ("nanotron", "2025-02", "nanotron:25.02"),
        (
            "PyTorch NVIDIA Release 23.09",
            "2025-11",
            "megatron:25.11",
        ),  # no release of two years ago
        ("Megatron-DeepSpeed", "2024-09", "megatron-deepspeed:24.09"),
        ("MaxText (JAX)", "2024-2026", "maxtext:24.01"),
        ("MaxText (JAX)", "2026-08", "maxtext:26.08"),
        ("TRL 0.21 + accelerate", "2025-09", "transformers:25.09"),
        ("something new", "", "other:"),
    ],
)
def test_software_has_a_family_and_a_generation(framework, date, name):
    assert software_of(CsvRow(2, {"framework": framework, "source_date": date}, {})) == name


@pytest.mark.parametrize(
    ("interconnect", "per_node", "gbit_per_s"),
    [
        ("NVLink4 + EFA (400 Gb/s per GPU)", 8, 400),
        ("NVLink + 4x Omni-Path 100 Gb/s per node", 8, 50),
        ("RoCE 1600 Gb/s per node", 8, 200),
        ("NVLink3 + 2 Tb/s RoCE per node", 8, 250),
        ("NVLink3 300 GB/s/dir + 8x HDR 200 Gb/s", 8, 200),
        ("NVLink5 900 GB/s/dir x8 + InfiniBand 400 Gb/s per GPU", 8, 400),
        ("NVLink5 900 GB/s/dir x72", 4, 0),
        ("RoCE 1600 Gb/s per node", 0, 0),
        ("", 8, 0),
    ],
)
def test_a_network_is_read_per_device(interconnect, per_node, gbit_per_s):
    found = network_bytes_per_s(interconnect, per_node)
    assert found == pytest.approx(gbit_per_s * 1e9 / 8)


def test_a_row_computes_on_its_own_network(tmp_path):
    slow, fast = read(
        tmp_path,
        row(interconnect="RoCE 800 Gb/s per node"),
        row(interconnect="InfiniBand NDR 400 Gb/s per GPU"),
    )
    assert slow.machine.network_bandwidth.value == pytest.approx(12.5e9)
    assert fast.machine.network_bandwidth.value == pytest.approx(50e9)
    assert len(batches([slow, fast])) == 2


def test_printed_sizes_and_the_count_decide_what_is_not_printed(tmp_path):
    gated, plain, experts = read(
        tmp_path,
        row(),  # Llama 3 8B: 8.03 billion only with three matrices and two tables
        row(params_b="6.66", kv_heads="32", ffn="16384", vocab="50368"),  # MPT 7B: two, tied
        row(
            *(),
            model="another",
            params_b="46.7",
            ffn="14336 expert",
            vocab="32000",
            experts="8",
            topk="2",
        ),  # Mixtral 8x7B
    )
    assert gated.shape.layers[0].feed_forward.is_gated and not gated.shape.tied_head
    assert gated.shape.num_params == pytest.approx(8.03e9, rel=0.002)
    assert not plain.shape.layers[0].feed_forward.is_gated and plain.shape.tied_head
    assert plain.shape.num_params == pytest.approx(6.66e9, rel=0.01)
    assert experts.row_class == "moe"
    assert experts.shape.num_params == pytest.approx(46.7e9, rel=0.002)


def test_a_known_model_that_is_cut_short_keeps_a_layer_of_each_kind():
    whole = known_shape("deepseek-v3")
    short = cut(whole, 4)
    kinds = [(layer.count, bool(layer.feed_forward.num_experts)) for layer in short.layers]
    assert kinds == [(1, False), (3, True)]
    assert cut(whole, 61) is whole
    assert [cut(whole, n).num_layers for n in range(1, 61)] == list(range(1, 61))


def test_rows_that_one_call_prices_are_joined_in_order(tmp_path):
    rows = read(tmp_path, row(), row(tp="4"), row(dtype="FP8"), row(tp="8"))
    first, other = batches(rows)
    assert [each.line for each in first.rows] == [2, 3, 5]
    assert first.plans.tensor.tolist() == [2, 4, 8] and first.plans.data.tolist() == [4, 2, 1]
    assert other.plans.precision == "fp8"
    assert all(getattr(first.plans, name).shape == (3,) for name in COLUMNS)


def test_classes_follow_sources_workloads_and_experts(tmp_path):
    made = read(
        tmp_path,
        row(source_id="nvidia_somewhere"),
        row(source_id="vtrain_again"),
        row(workload="lora"),
        row(workload="rl_grpo"),
        row(source_id="a blog"),
        row(source_id="nvidia_somewhere", workload="sft"),
    )
    classes = [each.row_class for each in made]
    assert classes == ["vendor-tuned", "grid", "lora", "rl", "other", "other"]
    assert "generation" in made[3].missing[-1]


def test_five_plans_of_one_question_are_a_grid_wherever_they_come_from(tmp_path):
    plans = [row(source_id="a sweep", tp=str(tp), n_devices="16") for tp in (1, 2, 4, 8, 16)]
    plans = [each | {"global_batch_seqs": "64"} for each in plans]
    assert {each.row_class for each in read(tmp_path, *plans)} == {"grid"}
    assert {each.row_class for each in read(tmp_path, *plans[1:])} == {"other"}
    twice = [*plans[1:], plans[1]]  # four plans, one of them measured twice
    assert {each.row_class for each in read(tmp_path, *twice)} == {"other"}


def test_steps_and_memory_are_in_the_units_that_rows_name(tmp_path):
    rate, gib, failed = read(
        tmp_path,
        row(step_time_s="", tokens_per_s_per_device="8192"),
        row(memory_gb="10", memory_kind="GiB (torch allocator)"),
        row(status="crash_or_oom", step_time_s="", source_check="from memory of the paper"),
    )
    assert rate.measured_step_s == pytest.approx(2.0)  # 16 rows of 8192 tokens on 8 devices
    assert gib.measured_memory_bytes == 10 * 2**30
    assert failed.failed and failed.measured_step_s is None and not failed.is_trusted


def test_submissions_on_nvidia_devices_run_nvidia_code():
    cells = {"framework": "PyTorch", "source_date": "2025-06", "source_id": "mlperf_training"}
    on = [{"hardware": name} | cells for name in ("NVIDIA H200", "AMD MI300X")]
    assert [software_of(CsvRow(2, each, {})) for each in on] == ["megatron:25.06", "torch:25.06"]


def test_experts_and_recomputation_that_a_framework_implies(tmp_path):
    experts = {"model": "gpt-oss-120b", "layers": "", "hidden": "", "n_devices": "64", "tp": "1"}
    experts |= {"global_batch_seqs": "64", "framework": "NeMo AutoModel"}
    spread, given = read(tmp_path, row(**experts), row(**experts, ep="8"))
    assert (spread.plans.expert, given.plans.expert) == (64, 8)
    large = {"model": "llama3-70b", "layers": "", "hidden": "", "micro_batch_seqs": "4"}
    large |= {"n_devices": "64", "tp": "1", "global_batch_seqs": "256"}
    names = [
        RECOMPUTE[int(each.plans.recompute)]
        for each in read(
            tmp_path,
            row(**large, framework="NeMo AutoModel"),  # 80 GB cannot hold four such rows
            row(**large, framework="NeMo AutoModel", recompute="none"),
            row(**large, framework="NeMo AutoModel", status="crash_or_oom"),
            row(**large, framework="Megatron-LM"),
            row(**large | {"model": "llama3-8b", "micro_batch_seqs": "1"}, framework="AutoModel"),
        )
    ]
    assert names == ["full", "none", "none", "none", "none"]


def test_flops_are_seconds_only_by_a_rule_that_the_notes_name(tmp_path):
    cells = {"step_time_s": "", "tflops_per_device": "400", "seq_len_tokens": "2048"}
    known, unknown = read(tmp_path, row(**cells, notes="pre-July-2025 FLOP rule"), row(**cells))
    # 6 N tokens without the embedding, and 12 L s H C tokens
    flops = (6 * (8.03e9 - 128256 * 4096) + 12 * 32 * 2048 * 4096) * 16 * 2048
    assert known.measured_step_s == pytest.approx(flops / (8 * 400e12), rel=0.002)
    assert unknown.measured_step_s is None


CELLS = st.sampled_from(["", "0", "1", "2", "3.5", "8", "1e9", "1e300"])
WORDS = st.text(max_size=12) | st.sampled_from(["FSDP", "NVIDIA H100", "768 expert", "llama3-8b"])


@settings(max_examples=40, deadline=None)
@given(
    st.fixed_dictionaries(
        {name: CELLS if name in NUMBERS else WORDS | st.just(LLAMA_ROW[name]) for name in LLAMA_ROW}
    )
)
def test_any_row_is_a_plan_or_says_what_it_lacks(tmp_path_factory, cells):
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_text(text(cells))
    try:
        found = read_training(path)
    except PhalanxError as error:
        assert "\n" not in error.sentence()
        return
    for each in found:
        assert each.missing or (each.plans is not None and each.shape is not None)
        if each.plans is not None:
            assert np.prod([each.plans.devices]) == each.devices
