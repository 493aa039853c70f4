"""A configuration of verl's supervised trainer, on its FSDP or its Megatron engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.cost.training_plans import CONTEXT_KINDS, RECOMPUTE, SCHEDULES
from phalanx.planner.emitters.base import Site, Writing, peft_expression, yaml_text
from phalanx.planner.importers.foreign import ForeignPlan

VERSION = "0.9.1"
FILE = "verl_sft.yaml"


def write(plan: ForeignPlan, site: Site) -> Mapping[str, str]:
    """The file: what differs from verl's own `sft_trainer_engine` configuration.

    Raises:
        PlanError: `emit/impossible` for what neither engine has.
    """
    writing = Writing("verl", VERSION, plan)
    row = writing.row
    on_megatron = max(row["tensor"], row["pipeline"], row["expert"]) > 1 or row["zero"] in (1, 2)
    engine = _megatron(writing) if on_megatron else _fsdp(writing)
    name = "megatron" if on_megatron else "fsdp"
    nodes = -(-writing.devices // site.devices_per_node)
    table: dict[str, Any] = {
        "defaults": [
            "sft_trainer_engine",
            {"override engine@engine": name},
            {"override optim@optim": name},
            "_self_",
        ],
        "hydra": {"searchpath": ["pkg://verl.trainer.config"]},
        "model": _model(writing, on_megatron),
        "engine": engine,
        "data": _data(writing),
        "optim": {"lr": plan.lr} if plan.lr is not None else {},
        "trainer": {
            "nnodes": nodes,
            "n_gpus_per_node": min(writing.devices, site.devices_per_node),
        },
    }
    if plan.steps:
        table["trainer"]["total_training_steps"] = plan.steps
    elif plan.epochs:
        whole = plan.epochs == int(plan.epochs)
        writing.require(whole, "epochs", "must be whole", [int(plan.epochs) or 1])
        table["trainer"]["total_epochs"] = int(plan.epochs)
    program = f"verl.trainer.sft_trainer --config-dir . --config-name {FILE[:-5]}"
    how = f"{writing.torchrun(site)} -m {program}"
    text = yaml_text({key: each for key, each in table.items() if each})
    return {FILE: writing.header(f"Start: {how}") + text}


def _model(writing: Writing, on_megatron: bool) -> dict[str, Any]:
    plan, row = writing.plan, writing.row
    again = RECOMPUTE[row["recompute"]]
    table: dict[str, Any] = {"path": writing.model()}
    if not on_megatron:
        rule = "layers are recomputed whole or not at all"
        writing.require(again != "selective", "recompute", rule, ["full", "none"])
        table["enable_gradient_checkpointing"] = again == "full"
    if plan.method == "pretrain":
        writing.lacks("that the model starts from fresh weights: it is loaded")
    if plan.method == "lora":
        writing.require((plan.base_bits or 16) == 16, "base_bits", "weights stay whole", [16])
        alpha = plan.lora_alpha if plan.lora_alpha is not None else 2 * (plan.lora_rank or 16)
        if on_megatron:
            table["lora"] = {"rank": plan.lora_rank or 16, "alpha": alpha}
            writing.lacks_fields("lora_targets")
        else:
            targets = plan.lora_targets or ()
            table |= {"lora_rank": plan.lora_rank or 16, "lora_alpha": alpha}
            table["target_modules"] = peft_expression(targets) or list(targets) or "all-linear"
    return table


def _fsdp(writing: Writing) -> dict[str, Any]:
    plan, row = writing.plan, writing.row
    if row["zero"] == 0:
        rule = "verl shards weights on more than one device"
        writing.require(row["data"] == 1, "zero", rule, [3])
    kind = CONTEXT_KINDS[row["context_kind"]]
    rule = "verl's FSDP engine exchanges heads (ulysses)"
    writing.require(row["context"] == 1 or kind == "ulysses", "context_kind", rule, ["ulysses"])
    rule = "bf16 and fp16 are what it computes in"
    precision = plan.precision or "bf16"
    writing.require(precision in ("bf16", "fp16"), "precision", rule, ["bf16", "fp16"])
    writing.only("offload", (0, 1))
    return {
        "strategy": "fsdp2",
        "fsdp_size": row["shard"] if row["replicate"] > 1 else -1,
        "reshard_after_forward": not row["keeps_gathered"],
        "ulysses_sequence_parallel_size": row["context"],
        "offload_policy": bool(row["offload"]),
        "model_dtype": "bf16" if plan.master_dtype == "bfloat16" else "fp32",
        "dtype": "float16" if precision == "fp16" else "bfloat16",
    }


def _megatron(writing: Writing) -> dict[str, Any]:
    plan, row = writing.plan, writing.row
    writing.only("zero", (0, 1))
    schedule = SCHEDULES[row["schedule"]]
    legal = ("1f1b", "interleaved")
    rule = "verl's Megatron engine has no such schedule"
    writing.require(row["pipeline"] == 1 or schedule in legal, "schedule", rule, legal)
    kind = CONTEXT_KINDS[row["context_kind"]]
    rule = "verl's Megatron engine passes keys and values around a ring"
    writing.require(row["context"] == 1 or kind == "ring", "context_kind", rule, ["ring"])
    rule = "moments are shared by all data ranks"
    writing.require(row["zero"] == 0 or row["replicate"] == 1, "shard", rule)
    precision = plan.precision or "bf16"
    rule = "bf16 and fp16 are what it computes in"
    writing.require(precision in ("bf16", "fp16"), "precision", rule, ["bf16", "fp16"])
    again = RECOMPUTE[row["recompute"]]
    recompute: dict[str, Any] = {}
    if again != "none":
        recompute["recompute_granularity"] = again
    if again == "full":
        recompute |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    writing.only("offload", (0, 1))
    return {
        "tensor_model_parallel_size": row["tensor"],
        "pipeline_model_parallel_size": row["pipeline"],
        "virtual_pipeline_model_parallel_size": row["virtual"] if row["virtual"] > 1 else None,
        "context_parallel_size": row["context"],
        "expert_model_parallel_size": row["expert"],
        "expert_tensor_parallel_size": row["expert_tensor"] if row["expert"] > 1 else None,
        "sequence_parallel": bool(row["sequence_parallel"]),
        "use_distributed_optimizer": row["zero"] == 1,
        "optimizer_offload": bool(row["offload"]),
        "override_transformer_config": recompute,
        "dtype": "float16" if precision == "fp16" else "bfloat16",
    }


def _data(writing: Writing) -> dict[str, Any]:
    plan, row = writing.plan, writing.row
    documents = plan.step_documents or 0  # verl counts a batch in documents, and packs by tokens
    each = max(1, round(documents / row["data"]))
    table: dict[str, Any] = {
        "train_batch_size": each * row["data"] if documents else writing.step_rows,
        "micro_batch_size_per_gpu": row["micro_rows"],
        "use_dynamic_bsz": documents > 0,
        "max_length": row["row_tokens"],
        "max_token_len_per_gpu": row["row_tokens"] * row["micro_rows"] // row["context"],
    }
    if data := writing.data():
        table["train_files"] = data
        if not data.endswith(".parquet"):
            writing.lacks("that data has to be Parquet files with a column of messages")
    if documents:
        writing.lacks(f"tokens of a step: {documents} documents hold them on average")
    elif plan.packed:
        writing.lacks("rows of several documents: verl removes padding instead")
    return table
