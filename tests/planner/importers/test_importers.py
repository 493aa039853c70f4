"""What each key of another program's configuration means, and where it stands."""

import json

import pytest

from phalanx.cost.model_shape import shape_of
from phalanx.errors import PhalanxError
from phalanx.models.config import parse_config
from phalanx.planner.importers import (
    ALL_LEFT,
    changes,
    config_file,
    foreign_plans,
    job_keys,
    read_text,
    told,
)
from phalanx.planner.importers.merge import merged
from tests.planner.importers.samples import SAMPLES


def read(kind, *replacements):
    name, text = SAMPLES[kind]
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    return read_text(text, name)


def notes(plan, kind):
    return {note.key for note in plan.notes if note.kind == kind}


def values(plan, *names):
    return tuple(getattr(plan, name) for name in names)


MESH = ("tensor", "pipeline", "context", "replicate", "shard", "zero", "virtual", "schedule")
BATCH = ("micro_rows", "row_tokens", "num_micro", "step_rows")
ADAPTERS = ("method", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "base_bits")


def test_accelerates_hybrid_shard_is_a_group_to_a_machine():
    plan = read("accelerate")
    assert values(plan, "devices", "replicate", "shard", "zero") == (16, 2, 8, 3)
    assert values(plan, "precision", "recompute", "keeps_gathered") == ("bf16", "full", False)
    assert plan.origin["recompute"] == "line 5: fsdp_config.fsdp_activation_checkpointing"
    assert plan.model is None and job_keys(plan) == {}


@pytest.mark.parametrize(
    "strategy, zero, kept",
    [("FULL_SHARD", 3, False), ("SHARD_GRAD_OP", 3, True), ("1", 3, False), ("2", 3, True)],
)
def test_accelerates_strategies_are_stages(strategy, zero, kept):
    plan = read("accelerate", ("HYBRID_SHARD", strategy))
    assert values(plan, "zero", "keeps_gathered", "shard") == (zero, kept, ALL_LEFT)


def test_accelerates_replicas_share_nothing():
    for old, new in (("HYBRID_SHARD", "NO_SHARD"), ("type: FSDP", "type: MULTI_GPU")):
        plan = read("accelerate", (old, new))
        assert values(plan, "zero", "shard") == (0, 1)
        assert foreign_plans(plan, 16, row_tokens=512).row(0)["shard"] == 1


def test_accelerates_deepspeed_stage_and_offload_are_read():
    text = (
        "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n"
        "  zero_stage: 2\n  offload_optimizer_device: cpu\n  gradient_accumulation_steps: 4\n"
    )
    plan = read_text(text, "ds.yaml")
    assert values(plan, "zero", "shard", "offload", "num_micro") == (2, ALL_LEFT, 1.0, 4)


def test_axolotls_four_bit_adapters():
    plan = read("axolotl")
    assert values(plan, *ADAPTERS) == ("lora", 32, 16, 0.05, None, 4)
    assert values(plan, *BATCH) == (2, 4096, 4, None)
    assert plan.data == "tatsu-lab/alpaca" and plan.origin["data"] == "line 5: datasets.0.path"
    assert values(plan, "epochs", "lr", "moment_bytes", "recompute") == (3, 2e-4, 2.0, "full")
    assert values(plan, "zero", "precision") == (0, "bf16")
    assert notes(plan, "unknown") == {"colour"} and notes(plan, "not modelled") >= {"rl"}
    assert notes(plan, "not part of the price") >= {"warmup_ratio"}
    assert notes(plan, "assumed") == {"datasets.1.path"}


def test_axolotls_fsdp_shards_all_that_is_left_of_the_devices():
    more = "fsdp_config:\n  reshard_after_forward: true\ncontext_parallel_size: 2\ncolour: blue"
    row = foreign_plans(read("axolotl", ("colour: blue", more)), 8).row(0)
    assert (row["zero"], row["shard"], row["context"], row["data"]) == (3, 8, 2, 4)


@pytest.mark.parametrize("prefix", ["", "fsdp_"])
def test_axolotls_fsdp_keys_stand_with_and_without_their_prefix(prefix):
    more = (
        f"fsdp_config:\n  {prefix}sharding_strategy: SHARD_GRAD_OP\n  {prefix}offload_params: true"
    )
    plan = read("axolotl", ("colour: blue", more))
    assert values(plan, "zero", "keeps_gathered", "offload") == (3, True, 1.0)
    assert not notes(plan, "unknown")


def test_trls_own_fields():
    plan = read("trl")
    assert values(plan, *ADAPTERS) == ("lora", 32, 64, 0.05, ("q_proj", "v_proj"), 4)
    assert values(plan, *BATCH) == (2, 2048, 8, None)
    assert values(plan, "epochs", "steps", "master_dtype") == (2, None, "bfloat16")
    assert values(plan, "moment_bytes", "recompute") == (2.0, "full")
    assert notes(plan, "not modelled") == {"use_liger_kernel"}
    assert job_keys(plan, 4)["train.global_batch_tokens"] == 2 * 8 * 4 * 2048


def test_trls_command_line_means_the_same_as_its_file():
    _, text = SAMPLES["trl"]
    words = [
        f"--{line.split(':')[0]} {line.split(': ')[1].strip('[]').replace(', ', ' ')}"
        for line in text.splitlines()
        if ": " in line and not line.startswith(" ")
    ]
    plan = read_text(f"trl sft {' '.join(words)}\n", "sft.sh")
    assert plan.stated() == read("trl").stated()
    other = read_text(f"trl dpo {' '.join(words)}\n", "dpo.sh")
    assert "command" in notes(other, "not modelled")


def test_a_launch_file_and_a_training_file_are_one_plan():
    plan = merged(read("trl"), read("accelerate"))
    assert values(plan, "devices", "zero", "shard", "lora_rank") == (16, 3, 8, 32)
    row = foreign_plans(plan, 16).row(0)
    assert (row["data"], row["shard"], row["num_micro"]) == (16, 8, 8)
    with pytest.raises(PhalanxError, match="do not belong together"):
        merged(read("trl"), read("axolotl"))


def test_torchtitans_axes_shard_weights_over_context_ranks_too():
    plan = read("torchtitan")
    assert plan.model == "meta-llama/Llama-3.1-405B"
    assert values(plan, *MESH) == (8, 8, 2, 2, 8, 3, 4, "interleaved")
    assert values(plan, *BATCH) == (1, 8192, 16, None)
    assert values(plan, "precision", "recompute", "lr") == ("fp8", "full", 8e-5)
    assert values(plan, "keeps_gathered", "context_kind") == (True, "all-gather")
    assert notes(plan, "not modelled") >= {"parallelism.enable_async_tensor_parallel"}
    row = foreign_plans(plan, 1024).row(0)
    assert (row["data"], row["shard"], row["num_micro"]) == (8, 8, 16)


def test_torchtitans_rest_of_the_devices_shards():
    plan = read("torchtitan", ("shard_degree = 4", "shard_degree = -1"))
    assert plan.shard == ALL_LEFT
    assert foreign_plans(plan, 2048).row(0)["shard"] == 16


def test_megatrons_script_is_read_with_its_variables():
    plan = read("megatron")
    assert values(plan, "devices", *MESH[:3]) == (128, 4, 2, 2)
    assert values(plan, "zero", "virtual", "schedule") == (1, 4, "interleaved")
    assert values(plan, *BATCH) == (2, 8192, None, 1024)
    assert plan.sizes["num_key_value_heads"] == 8 and plan.sizes["intermediate_size"] == 14336
    assert plan.sizes["tie_word_embeddings"] is False and plan.sizes["vocab_size"] == 128256
    assert values(plan, "recompute", "precision", "steps") == ("selective", "bf16", 500)
    assert plan.origin["row_tokens"] == "line 26: seq-length"
    assert plan.origin["micro_rows"] == "line 17: micro-batch-size"
    assert notes(plan, "assumed") == {"data-path"}  # $DATA comes from outside
    row = foreign_plans(plan, 128).row(0)
    assert (row["data"], row["shard"], row["num_micro"]) == (8, 16, 64)


def test_sizes_without_a_name_become_a_configuration_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = json.loads(config_file(read("megatron")).read_text())
    shape = shape_of(parse_config(config, "megatron"))
    assert abs(shape.num_params - 8.03e9) < 0.01e9  # Llama 3.1 8B
    experts = read("megatron", ("--swiglu", "--swiglu --num-experts 8 --moe-router-topk 2"))
    assert json.loads(config_file(experts).read_text())["num_local_experts"] == 8
    with pytest.raises(PhalanxError, match="missing are vocab_size; name MODEL"):
        config_file(read("megatron", ("--vocab-size 128256", "")))


def test_a_bare_list_of_megatrons_arguments_is_enough():
    text = "--tensor-model-parallel-size 2 --num-layers 4 --micro-batch-size 1 --seq-length 512"
    plan = read_text(text, "args.txt")
    assert values(plan, "kind", "tensor", "micro_rows") == ("megatron", 2, 1)


def test_options_that_a_script_only_keeps_in_variables_are_read():
    text = 'MODEL="--num-layers 4 --hidden-size 64"\nRUN=(--micro-batch-size 2 --seq-length 512)\n'
    plan = read_text(text, "model.sh")
    assert values(plan, "kind", "micro_rows", "row_tokens") == ("megatron", 2, 512)
    assert plan.sizes["hidden_size"] == 64


def test_a_vllm_line_says_devices_limits_and_sizes_of_elements():
    plan = read("vllm")
    assert values(plan, "role", "model") == ("serve", "meta-llama/Llama-3.1-70B-Instruct")
    assert values(plan, "devices", "tensor", "replicate", "expert") == (8, 4, 2, 8)
    assert values(plan, "max_tokens", "max_running") == (32_000, 128)
    assert values(plan, "weight_bits", "kv_bits", "precision") == (8, 8, "fp8")
    assert values(plan, "caches_prefixes", "memory_frac") == (False, 0.92)
    assert notes(plan, "unknown") == {"frobnicate"}
    assert notes(plan, "not modelled") == {"enforce-eager"}
    assert job_keys(plan)["serve.max_tokens"] == 32_000


def test_vllms_module_takes_the_same_options():
    text = "python -m vllm.entrypoints.openai.api_server --model m --tensor-parallel-size 2\n"
    plan = read_text(text, "")
    assert values(plan, "model", "tensor", "devices") == ("m", 2, 2)


@pytest.mark.parametrize("kind", SAMPLES)
def test_every_value_says_where_it_comes_from_and_no_key_is_dropped(kind):
    plan = read(kind)
    assert set(plan.stated()) <= set(plan.origin)
    rows = told(plan)
    assert {what for what, _, _ in rows} >= set(plan.stated())
    assert all(what and value for what, value, _ in rows)


@pytest.mark.parametrize(
    "kind, old, new, line, key",
    [
        ("accelerate", "HYBRID_SHARD", "HALF", 4, "fsdp_config.fsdp_sharding_strategy"),
        ("accelerate", "num_processes: 16", "num_processes: many", 10, "num_processes"),
        ("axolotl", "micro_batch_size: 2", "micro_batch_size: 0", 15, "micro_batch_size"),
        ("axolotl", "lora_r: 32\n", "", 3, "adapter"),
        ("trl", "max_length: 2048", "max_length: -5", 10, "max_length"),
        ("torchtitan", "Interleaved1F1B", "Best", 23, "parallelism.pipeline_parallel_schedule"),
        ("torchtitan", "seq_len = 8192", "seq_len = nan", 14, "training.seq_len"),
        ("megatron", "--micro-batch-size 2", "--micro-batch-size two", 17, "micro-batch-size"),
        ("megatron", "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size $PP", 21,
         "pipeline-model-parallel-size"),
        ("megatron", "-virtual-pipeline-stage 4", "-virtual-pipeline-stage 5", 22,
         "num-layers-per-virtual-pipeline-stage"),
        ("vllm", "--max-model-len 32k", "--max-model-len long", 4, "max-model-len"),
        ("vllm", "-tp $TP", "-tp 0", 3, "tensor-parallel-size"),
    ],
)  # fmt: skip
def test_a_bad_value_is_one_line_with_file_line_and_key(kind, old, new, line, key):
    with pytest.raises(PhalanxError) as caught:
        read(kind, (old, new))
    error = caught.value
    assert error.code == "foreign/value" and error.exit_code == 2
    assert error.where == f"{SAMPLES[kind][0]}:{line}: {key}"
    assert "\n" not in error.sentence()


def test_axes_that_do_not_fit_the_devices_are_refused_with_the_nearest():
    with pytest.raises(PhalanxError) as caught:
        foreign_plans(read("megatron"), 100)
    assert caught.value.code == "emit/impossible" and caught.value.legal == (96, 112)
    with pytest.raises(PhalanxError) as caught:
        foreign_plans(read("megatron", ("size 1024", "size 1000")), 128)
    assert caught.value.legal == (992, 1008) or caught.value.legal == (1008, 992)


def test_what_to_change_names_only_what_differs():
    given = foreign_plans(read("megatron"), 128)
    same = foreign_plans(read("megatron"), 128, context_kind=2)
    assert changes(given, given) == []
    assert changes(given, same) == ["kind of context parallelism ring -> ulysses"]
    other = foreign_plans(read("megatron", ("TP=4", "TP=8")), 128)
    assert "tensor parallel 4 -> 8" in changes(given, other)
