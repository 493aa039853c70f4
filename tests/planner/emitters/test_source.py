"""A job and a row of priced plans are what emitters write, and nothing that nobody chose."""

import tomllib
from dataclasses import replace

import pytest
import yaml

from phalanx.cost.model_shape import AttentionShape, FeedForwardShape, LayerShape, ModelShape
from phalanx.cost.training_plans import TrainingPlans
from phalanx.errors import PlanError
from phalanx.job import load_job
from phalanx.planner.emitters import emit, plan_of, priced_as
from phalanx.planner.emitters.source import sizes_of
from phalanx.planner.importers import foreign_plans, read_text
from tests.planner.emitters.plans import LLAMA_8B

FLAGS = {
    "model.name": "llama-3.1-8b",
    "data.source": "chat.jsonl",
    "train.method": "full",
    "train.steps": 10,
}


def llama(other_params=0, **attention):
    """Llama 3.1 8B by its published sizes."""
    parts = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    layer = LayerShape(
        count=32,
        attention=AttentionShape(**(parts | attention)),
        feed_forward=FeedForwardShape(width=14336),
        other_params=other_params,
    )
    return ModelShape(name="llama", hidden=4096, vocab=128256, layers=(layer,))


def plans():
    return TrainingPlans(
        data=[8, 16], shard=[8, 8], zero=3, micro_rows=1, row_tokens=4096, num_micro=4, recompute=2
    )


def test_a_row_of_the_table_is_what_is_written():
    plan = plan_of(load_job(flags=FLAGS), plans(), 1, llama())
    assert (plan.devices, plan.shard, plan.replicate, plan.steps) == (16, 8, 2, 10)
    assert plan.recompute == "full" and plan.sizes == LLAMA_8B
    read = read_text(emit("torchtitan", plan)["torchtitan.toml"], "torchtitan.toml")
    assert foreign_plans(read, 16).row(0) == foreign_plans(plan, 16).row(0)
    assert read.data == "chat.jsonl" and read.model == "meta-llama/Llama-3.1-8B"


def test_defaults_of_phalanx_are_no_choice_for_another_program():
    job = load_job(flags={"model.name": "llama-3.1-8b", "train.method": "full"})
    plan = plan_of(job, plans(), 0)
    assert plan.data is None and plan.lr is None and plan.sizes == {}
    assert "learning_rate" not in emit("trl", plan)["sft.yaml"]
    assert "dataset_name: the plan names no data" in emit("trl", plan)["sft.yaml"]


def test_adapters_keep_their_settings():
    flags = FLAGS | {"train.method": "lora", "train.lora_rank": 8, "train.lora_targets": "q_proj"}
    text = emit("trl", plan_of(load_job(flags=flags), plans(), 0))["sft.yaml"]
    assert "lora_r: 8" in text and "- q_proj" in text


def test_sizes_are_told_of_models_whose_layers_are_alike_alone():
    assert sizes_of(llama()) == LLAMA_8B
    assert sizes_of(llama(window=1024)) == {}
    assert sizes_of(llama(kind="latent")) == {}


def test_norms_of_heads_and_biases_are_told_and_other_parts_are_not_lost_in_silence():
    normed, biased = llama(2 * 128), llama((32 + 2 * 8) * 128)
    assert sizes_of(normed) == LLAMA_8B | {"use_qk_norm": True}
    assert sizes_of(biased) == LLAMA_8B | {"qkv_bias": True}
    assert sizes_of(llama(17)) == {}
    script = emit("megatron", plan_of(load_job(flags=FLAGS), plans(), 0, normed))["megatron.sh"]
    assert "--qk-layernorm\n" in script and "--add-qkv-bias" not in script
    with pytest.raises(PlanError, match="parts that are not described"):
        emit("megatron", plan_of(load_job(flags=FLAGS), plans(), 0, llama(17)))


@pytest.mark.parametrize("target", ["trl", "verl", "megatron"])
def test_names_that_only_phalanx_knows_are_not_written(target):
    flags = FLAGS | {"model.name": "llama-3.1-8b", "data.source": "python-docs"}
    text = "".join(emit(target, plan_of(load_job(flags=flags), plans(), 0, llama())).values())
    options = "".join(line for line in text.splitlines(True) if not line.startswith("#"))
    assert "meta-llama/llama-3.1-8b" in options and "python-docs" not in options
    assert "python-docs comes with Phalanx" in text and "how the Hub spells" in text


def test_the_length_that_was_priced_is_written_where_the_job_says_none():
    job = load_job(flags={"model.name": "llama-3.1-8b", "train.method": "full"})
    assert "max_steps" not in emit("trl", plan_of(job, plans(), 0))["sft.yaml"]
    priced = plan_of(job, plans(), 0, length={"epochs": 1.0})
    assert "num_train_epochs: 1.0" in emit("trl", priced)["sft.yaml"]
    stated = load_job(flags=FLAGS)
    assert plan_of(stated, plans(), 0, length={"epochs": 1.0}).epochs is None


def test_a_launcher_trains_the_job_that_was_planned_and_only_lays_it_out():
    flags = {"train.method": "lora", "train.seed": 7, "train.weight_decay": 0.2}
    job = load_job(flags=FLAGS | flags | {"train.global_batch_tokens": 10_000})
    rows = TrainingPlans(data=4, shard=1, zero=0, row_tokens=3000, num_micro=1)
    text = emit("slurm", plan_of(job, rows, step_documents=30))["job.toml"]
    again = load_job(flags={
        f"{section}.{key}": value
        for section, table in tomllib.loads(text).items()
        for key, value in table.items()
    })  # fmt: skip
    assert replace(again, plan=job.plan, origin={}) == replace(job, origin={})
    assert again.plan.row_tokens == 3000 and again.result_key == job.result_key


def test_verl_counts_a_step_in_documents_and_packs_them_by_tokens():
    rows = TrainingPlans(data=4, shard=4, zero=3, row_tokens=3000, num_micro=1)
    data = yaml.safe_load(
        emit("verl", plan_of(load_job(flags=FLAGS), rows, step_documents=30))["verl_sft.yaml"]
    )["data"]
    assert data["train_batch_size"] == 32  # a multiple of the data ranks
    assert data["use_dynamic_bsz"] is True and data["max_token_len_per_gpu"] == 3000


def test_files_are_priced_as_the_program_that_reads_them_runs():
    assert [priced_as(name) for name in ("trl", "accelerate", "torchtitan", "megatron", "sky")] == [
        "transformers", "transformers", "torch", "megatron", "",
    ]  # fmt: skip
