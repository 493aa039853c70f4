"""A launch script of Megatron-LM's pretrain_gpt.py."""

from __future__ import annotations

from collections.abc import Mapping
from shlex import quote
from typing import Any

from phalanx.cost.training_plans import CONTEXT_KINDS, RECOMPUTE, SCHEDULES
from phalanx.errors import PlanError
from phalanx.planner.emitters.base import Site, Writing
from phalanx.planner.importers.convert import IMPOSSIBLE
from phalanx.planner.importers.foreign import ForeignPlan

VERSION = "core 0.20.0 (2026-08-22)"
FILE = "megatron.sh"
_CONTEXT = {"ring": "p2p", "ulysses": "a2a", "all-gather": "all_gather"}
_SHARDED = {2: "optim_grads", 3: "optim_grads_params"}
_NEEDED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
_SIZES = {
    "num_hidden_layers": "num-layers",
    "hidden_size": "hidden-size",
    "intermediate_size": "ffn-hidden-size",
    "num_attention_heads": "num-attention-heads",
    "head_dim": "kv-channels",
    "vocab_size": "padded-vocab-size",
    "num_experts": "num-experts",
    "num_experts_per_tok": "moe-router-topk",
    "moe_intermediate_size": "moe-ffn-hidden-size",
    "shared_expert_intermediate_size": "moe-shared-expert-intermediate-size",
}

_PARTS = {"use_qk_norm": "qk-layernorm", "qkv_bias": "add-qkv-bias"}


def write(plan: ForeignPlan, site: Site) -> Mapping[str, str]:
    """The script.

    Raises:
        PlanError: `emit/impossible` for adapters, sizes that are not known, a schedule other than
            1F1B and the interleaved one, and weights that are kept gathered.
    """
    writing = Writing("megatron", VERSION, plan)
    groups = {
        "MODEL": _model(writing),
        "PARALLEL": _mesh(writing),
        "BATCH": _batch(writing),
        "PRECISION": _precision(writing),
        "DATA": _data(writing),
    }
    nodes = -(-writing.devices // site.devices_per_node)
    per_node = min(writing.devices, site.devices_per_node)
    writing.lacks_fields("epochs")
    writing.lacks("where checkpoints and logs go: --save, --load, --tensorboard-dir")
    writing.lacks(
        "the base and scaling of rotations, and epsilon of norms: --rotary-base and others"
    )
    if not writing.plan.lr:
        writing.lacks("--lr: the plan names no learning rate, and Megatron has no default")
    if not writing.plan.steps:
        writing.lacks("--train-iters: the plan names no number of steps")
    how = f"NODE_RANK=i MASTER_ADDR=host MEGATRON=folder-of-Megatron-LM bash {FILE}"
    text = writing.header(f"Start on each of {nodes} nodes: {how}")
    parts = [f"#!/bin/bash\n{text}", "set -euo pipefail", _connections(writing)]
    for name, options in groups.items():
        lines = [f"    --{key}{_words(value)}\n" for key, value in options.items()]
        parts.append(f"{name}_ARGS=(\n{''.join(lines)})\n")
    arrays = " ".join(f'"${{{name}_ARGS[@]}}"' for name in groups)
    parts.append(
        f"torchrun --nproc_per_node {per_node} --nnodes {nodes} \\\n"
        '    --node_rank "${NODE_RANK:-0}" --master_addr "${MASTER_ADDR:-localhost}" \\\n'
        '    --master_port "${MASTER_PORT:-29500}" \\\n'
        f'    "${{MEGATRON:-.}}/pretrain_gpt.py" {arrays}\n'
    )
    return {FILE: "\n".join(parts)}


def _connections(writing: Writing) -> str:
    """Megatron orders its exchanges by one queue, Megatron-FSDP overlaps them in several."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    return f"unset {name}\n" if writing.row["zero"] >= 2 else f"export {name}=1\n"


def _words(value: Any) -> str:
    return "" if value is True else f" {quote(str(value))}"


def _model(writing: Writing) -> dict[str, Any]:
    plan, sizes = writing.plan, writing.plan.sizes
    missing = [name for name in _NEEDED if name not in sizes]
    if missing:
        rule = f"megatron wants sizes; missing are {', '.join(missing)}"
        if not sizes:
            rule = "its layers differ, or have parts that are not described to megatron by sizes"
        raise PlanError(IMPOSSIBLE, "megatron: model", plan.model, rule)
    rule = "megatron trains all weights"
    writing.require(plan.method != "lora", "method", rule, ["full", "pretrain"])
    options: dict[str, Any] = {"use-mcore-models": True}
    options |= {key: sizes[name] for name, key in _SIZES.items() if name in sizes}
    groups = sizes.get("num_key_value_heads", sizes["num_attention_heads"])
    if groups != sizes["num_attention_heads"]:
        options |= {"group-query-attention": True, "num-query-groups": groups}
    longest = max(writing.row["row_tokens"], sizes.get("max_position_embeddings", 0))
    options |= {"seq-length": writing.row["row_tokens"], "max-position-embeddings": longest}
    if sizes.get("hidden_act", "silu") == "silu":
        options |= {"swiglu": True, "normalization": "RMSNorm", "disable-bias-linear": True}
        options |= {"position-embedding-type": "rope"}
        if "rope_theta" in sizes:
            options["rotary-base"] = int(sizes["rope_theta"])
    options |= {key: True for name, key in _PARTS.items() if sizes.get(name)}
    if sizes.get("num_experts"):  # what prices of experts assume
        options |= {"moe-token-dispatcher-type": "alltoall", "moe-grouped-gemm": True}
    if not sizes.get("tie_word_embeddings", False):
        options["untie-embeddings-and-output-weights"] = True
    if plan.method == "full":
        options["sft"] = True
    return options


def _mesh(writing: Writing) -> dict[str, Any]:
    row = writing.row
    options: dict[str, Any] = {
        "tensor-model-parallel-size": row["tensor"],
        "pipeline-model-parallel-size": row["pipeline"],
        "context-parallel-size": row["context"],
    }
    if row["context"] > 1:
        options["cp-comm-type"] = _CONTEXT[CONTEXT_KINDS[row["context_kind"]]]
    if row["sequence_parallel"]:
        options["sequence-parallel"] = True
    if row["expert"] > 1 or "num_experts" in writing.plan.sizes:
        options["expert-model-parallel-size"] = row["expert"]
        options["expert-tensor-parallel-size"] = row["expert_tensor"]
    return options | _pipeline(writing) | _sharding(writing)


def _pipeline(writing: Writing) -> dict[str, Any]:
    row = writing.row
    if row["pipeline"] == 1:
        return {}
    schedule = SCHEDULES[row["schedule"]]
    rule = "megatron has no such schedule"
    writing.require(schedule in ("1f1b", "interleaved"), "schedule", rule, ["1f1b", "interleaved"])
    layers, stages = writing.plan.sizes["num_hidden_layers"], row["pipeline"] * row["virtual"]
    rule = f"{layers} layers are no multiple of {stages} stages"
    writing.require(layers % stages == 0, "virtual", rule)
    return {"num-virtual-stages-per-pipeline-rank": row["virtual"]} if row["virtual"] > 1 else {}


def _sharding(writing: Writing) -> dict[str, Any]:
    row, options = writing.row, dict[str, Any]()
    rule = "megatron always gathers weights again"
    writing.require(not (row["zero"] and row["keeps_gathered"]), "keeps_gathered", rule, [False])
    if row["zero"] == 1:
        options["use-distributed-optimizer"] = True
    elif row["zero"]:
        options |= {"use-megatron-fsdp": True, "ckpt-format": "fsdp_dtensor"}
        options |= {"data-parallel-sharding-strategy": _SHARDED[row["zero"]]}
        options |= {"use-distributed-optimizer": True}
    if row["zero"] and row["replicate"] > 1:
        options["num-distributed-optimizer-instances"] = row["replicate"]
    if row["offload"]:
        writing.require(row["zero"] == 1, "offload", "wants the distributed optimizer", [0])
        options |= {"use-precision-aware-optimizer": True, "optimizer-cpu-offload": True}
        options["optimizer-offload-fraction"] = row["offload"]
    return options


def _batch(writing: Writing) -> dict[str, Any]:
    plan, row = writing.plan, writing.row
    options: dict[str, Any] = {
        "micro-batch-size": row["micro_rows"],
        "global-batch-size": writing.step_rows,
    }
    if plan.steps:
        options["train-iters"] = plan.steps
    if plan.lr:
        options["lr"] = plan.lr
    again = RECOMPUTE[row["recompute"]]
    if again != "none":
        options["recompute-granularity"] = again
    if again == "full":
        options |= {"recompute-method": "uniform", "recompute-num-layers": 1}
    return options


def _precision(writing: Writing) -> dict[str, Any]:
    precision = writing.plan.precision or "bf16"
    rule = "megatron keeps float32 master weights"
    writing.require(writing.plan.master_dtype != "bfloat16", "master_dtype", rule, ["float32"])
    if precision == "fp32":
        return {"transformer-impl": "transformer_engine"}
    options: dict[str, Any] = {"fp16": True} if precision == "fp16" else {"bf16": True}
    if precision == "fp8":
        options |= {"fp8-format": "hybrid"}
    if precision == "fp4":
        options |= {"fp4-format": "e2m1"}
    return options


def _data(writing: Writing) -> dict[str, Any]:
    plan = writing.plan
    options: dict[str, Any] = {"tokenizer-type": "HuggingFaceTokenizer"}
    if plan.model:
        options["tokenizer-model"] = writing.model()
    else:
        options = {"tokenizer-type": "NullTokenizer"}
        writing.lacks("the tokenizer")
    data = writing.data()
    options |= {"data-path": data} if data else {"mock-data": True}
    if data:
        writing.lacks("that data has to be in Megatron's indexed form (tools/preprocess_data.py)")
    return options
