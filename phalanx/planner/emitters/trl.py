"""TRL's supervised fine-tuning on accelerate: a launch configuration and a training one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from phalanx.cost.training_plans import CONTEXT_KINDS, RECOMPUTE
from phalanx.planner.emitters.base import Site, Writing, peft_expression, yaml_text
from phalanx.planner.importers.foreign import ForeignPlan

VERSION = "1.16.0 on accelerate 1.15.0"
FILES = ("accelerate.yaml", "sft.yaml")
_LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
_ROTATE = {"all-gather": "allgather", "ring": "alltoall"}


def write(plan: ForeignPlan, site: Site) -> Mapping[str, str]:
    """Both files.

    Raises:
        PlanError: `emit/impossible` for pipelines, experts, selective recomputation, fp4, and
            a sharding of moments alone.
    """
    writing = Writing("trl", VERSION, plan)
    _require(writing)
    launch, train = _launch(writing, site), _train(writing)
    writing.lacks("rows are packed by TRL's own rule: the first that fits, by decreasing length")
    writing.lacks("machine_rank and main_process_ip, where there are several machines")
    how = (
        f"Start: accelerate launch --config_file {FILES[0]} -m trl.scripts.sft --config {FILES[1]}"
    )
    header = writing.header(how)
    return {name: header + yaml_text(table) for name, table in zip(FILES, (launch, train))}


def _require(writing: Writing) -> None:
    row = writing.row
    for axis in ("pipeline", "expert"):
        writing.require(row[axis] == 1, axis, "TRL's trainer has no such axis", [1])
    writing.only("zero", (0, 3))
    again = RECOMPUTE[row["recompute"]]
    rule = "layers are recomputed whole or not at all"
    writing.require(again != "selective", "recompute", rule, ["full", "none"])
    writing.only("offload", (0, 1))
    words = ["bf16", "fp16", "fp32", "fp8"]
    precision = writing.plan.precision
    writing.require(precision in (None, *words), "precision", "accelerate has no such one", words)
    is_whole = precision != "fp32" or writing.plan.master_dtype != "bfloat16"
    rule = "weights in bfloat16 are multiplied in it"
    writing.require(is_whole, "precision", rule, ["bf16"])
    if row["zero"] == 0:
        for axis in ("tensor", "context"):
            rule = "accelerate splits tensors and rows with FSDP2 alone"
            writing.require(row[axis] == 1, axis, rule, [1])
        writing.require(row["offload"] == 0, "offload", "wants FSDP", [0])
    else:
        context = row["context"]
        rule = f"weights are sharded over the {context} context ranks as well"
        legal = [row["data"] * context]
        writing.require(row["shard"] % context == 0, "shard", rule, legal)
        alone = row["shard"] // context > 1 or row["replicate"] == 1
        rule = "accelerate does not replicate without sharding beside other axes"
        writing.require(alone, "replicate", rule, [1])
    rule = "the trainer splits no tokens between blocks over the tensor axis"
    writing.require(not row["sequence_parallel"], "sequence_parallel", rule, [False])


def _launch(writing: Writing, site: Site) -> dict[str, Any]:
    plan, row = writing.plan, writing.row
    nodes = -(-writing.devices // site.devices_per_node)
    table: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if row["zero"] else "MULTI_GPU" if writing.devices > 1 else "NO",
        "mixed_precision": {"fp32": "no", None: "bf16"}.get(plan.precision, plan.precision),
        "num_machines": nodes,
        "num_processes": writing.devices,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if row["zero"]:
        table["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": not row["keeps_gathered"],
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_offload_params": bool(row["offload"]),
            "fsdp_activation_checkpointing": RECOMPUTE[row["recompute"]] == "full",
        }
        table |= _axes(writing)
    return table


def _axes(writing: Writing) -> dict[str, Any]:
    row, at = writing.row, "parallelism_config_"
    context = row["context"]
    if row["tensor"] == context == row["replicate"] == 1:
        return {}
    kind = CONTEXT_KINDS[row["context_kind"]]
    axes: dict[str, Any] = {
        f"{at}dp_replicate_size": row["replicate"],
        f"{at}dp_shard_size": row["shard"] // context,
        f"{at}tp_size": row["tensor"],
        f"{at}cp_size": 1 if kind == "ulysses" else context,
        f"{at}sp_size": context if kind == "ulysses" else 1,
    }
    if kind == "ulysses":
        axes[f"{at}sp_backend"] = "deepspeed"
        axes[f"{at}sp_seq_length"] = row["row_tokens"]
        rule = "accelerate exchanges heads through DeepSpeed, not with FSDP"
        writing.require(context == 1, "context_kind", rule, sorted(_ROTATE))
    elif context > 1:
        axes[f"{at}cp_comm_strategy"] = _ROTATE[kind]
    return {"parallelism_config": axes}


def _train(writing: Writing) -> dict[str, Any]:
    plan, row = writing.plan, writing.row
    precision = plan.precision or "bf16"
    table: dict[str, Any] = {
        "model_name_or_path": writing.model(),
        "dtype": "bfloat16" if plan.master_dtype == "bfloat16" else "float32",
        "output_dir": "sft",
        "per_device_train_batch_size": row["micro_rows"],
        "gradient_accumulation_steps": row["num_micro"],
        "max_length": row["row_tokens"],
        "packing": plan.packed is not False,
        "bf16": precision == "bf16",  # else the launch configuration's precision counts
        "fp16": precision == "fp16",
        # FSDP recomputes by itself; both at once are refused
        "activation_checkpointing": RECOMPUTE[row["recompute"]] == "full" and not row["zero"],
    }
    table |= _data(writing)
    if plan.lr is not None:
        table["learning_rate"] = plan.lr
    if plan.steps:
        table["max_steps"] = plan.steps
    elif plan.epochs:
        table["num_train_epochs"] = plan.epochs
    return table | _adapters(writing)


def _data(writing: Writing) -> dict[str, Any]:
    """A Hub name, or a file with the loader that reads it."""
    if not writing.plan.data:
        writing.lacks("dataset_name: the plan names no data")
    data = writing.data()
    if not data:
        return {}
    loader = _LOADERS.get(PurePath(data).suffix)
    if loader:
        return {"datasets": [{"path": loader, "data_files": data}]}
    return {"dataset_name": data}


def _adapters(writing: Writing) -> dict[str, Any]:
    plan = writing.plan
    if plan.method != "lora":
        if plan.method == "pretrain":
            writing.lacks("that the model starts from fresh weights: it is loaded")
        return {}
    table: dict[str, Any] = {"use_peft": True, "lora_r": plan.lora_rank or 16}
    if plan.lora_alpha is not None:
        table["lora_alpha"] = int(plan.lora_alpha)
        whole = plan.lora_alpha == int(plan.lora_alpha)
        writing.require(whole, "lora_alpha", "must be whole", [int(plan.lora_alpha)])
    if plan.lora_dropout is not None:
        table["lora_dropout"] = plan.lora_dropout
    targets = plan.lora_targets or ("all-linear",)
    expression = peft_expression(targets)  # TRL unpacks a list of one
    table["lora_target_modules"] = [expression] if expression else list(targets)
    bits = plan.base_bits or 16
    if bits < 16:
        writing.require(bits in (4, 8), "base_bits", "weights have 4, 8 or 16 bits", [4, 8, 16])
        table[f"load_in_{bits}bit"] = True
    return table
