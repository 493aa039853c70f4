"""A job and one of its plans in the terms that emitters write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from phalanx.cost.model_shape import ModelShape
from phalanx.cost.training_plans import CONTEXT_KINDS, RECOMPUTE, SCHEDULES, TrainingPlans
from phalanx.job import Job
from phalanx.planner.importers.foreign import ForeignPlan

_WHERE = "the plan"


def plan_of(
    job: Job,
    plans: TrainingPlans,
    at: int = 0,
    shape: ModelShape | None = None,
    length: Mapping[str, float] | None = None,
    step_documents: int = 0,
) -> ForeignPlan:
    """One row of a table of plans, with what the job says of model, data and training.

    Args:
        shape: of the model; gives the sizes that some targets want.
        length: epochs or steps that were priced where the job says neither.
        step_documents: about so many of a data file fill a step; 0: rows of one length.

    Data, learning rate and length are left open where the job has them by default alone: a default
    of Phalanx is no choice for another program.
    """
    row = {name: column[at].item() for name, column in plans.columns().items()}
    whole = plans.take(np.array([at]))
    trains_adapters = job.train.method == "lora"
    values: dict[str, Any] = {
        "model": job.model.name,
        "sizes": sizes_of(shape) if shape else {},
        "data": job.data.source if "data.source" in job.origin else None,
        "method": job.train.method,
        "devices": int(whole.devices.max()),
        "replicate": int(row["data"] * row["context"] // row["shard"]) if row["zero"] else None,
        "schedule": SCHEDULES[int(row["schedule"])],
        "context_kind": CONTEXT_KINDS[int(row["context_kind"])],
        "recompute": RECOMPUTE[int(row["recompute"])],
        "offload": float(row["offload"]),
        "keeps_gathered": bool(row["keeps_gathered"]),
        "sequence_parallel": bool(row["sequence_parallel"]),
        "lr": job.train.lr if "train.lr" in job.origin else None,
        "precision": plans.precision,
        "master_dtype": job.train.master_dtype,
        "packed": True,
        "step_documents": step_documents or None,
    }
    for name in ("tensor", "pipeline", "context", "expert", "expert_tensor", "shard", "zero"):
        values[name] = int(row[name])
    for name in ("virtual", "micro_rows", "row_tokens", "num_micro"):
        values[name] = int(row[name])
    if job.train.epochs:
        values["epochs"] = job.train.epochs
    elif "train.steps" in job.origin:
        values["steps"] = job.train.steps
    else:
        values |= length or {}
    if trains_adapters:
        values |= {
            "lora_rank": job.train.lora_rank,
            "lora_alpha": job.train.lora_alpha,
            "lora_dropout": job.train.lora_dropout,
            "lora_targets": tuple(job.train.lora_targets) or None,
            "base_bits": plans.base_bits,
        }
    values = {name: value for name, value in values.items() if value is not None}
    origin = dict.fromkeys(values, _WHERE)
    own = _own_keys(job)
    return ForeignPlan(kind="phalanx", path=job.name, own_keys=own, origin=origin, **values)


def _own_keys(job: Job) -> dict[str, Any]:
    """What the job states of model, data and training, and its batch, which a job file needs."""
    return {
        key: value
        for key, value, origin in job.values()
        if key.startswith(("model.", "data.", "train."))
        and (origin != "default" or key == "train.global_batch_tokens")
    }


def sizes_of(shape: ModelShape) -> dict[str, Any]:
    """`config.json` keys of a decoder whose layers are alike, beside `use_qk_norm` and `qkv_bias`
    (known by the parameters that they add); {} for layers that differ or have other parts."""
    first = shape.layers[0]
    attention, forward = first.attention, first.feed_forward
    cached = attention.num_kv_heads * attention.head_dim
    parts = {
        0: {},
        2 * attention.head_dim: {"use_qk_norm": True},
        attention.num_heads * attention.head_dim + 2 * cached: {"qkv_bias": True},
    }
    is_plain = (
        first.norms == 2
        and first.other_params in parts
        and attention.kind == "softmax"
        and not attention.window
        and not attention.key_is_value
    )
    alike = all(replace(each, count=first.count) == first for each in shape.layers)
    if not (is_plain and alike and forward.is_gated):
        return {}
    sizes: dict[str, Any] = {
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden,
        "intermediate_size": forward.width or forward.expert_width,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied_head,
        "hidden_act": "silu",
    }
    if forward.num_experts:
        sizes |= {
            "num_experts": forward.num_experts,
            "num_experts_per_tok": forward.num_active,
            "moe_intermediate_size": forward.expert_width,
        }
        if forward.shared_width:
            sizes["shared_expert_intermediate_size"] = forward.shared_width
    return sizes | parts[first.other_params]
