"""A torchtitan job file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.cost.training_plans import CONTEXT_KINDS, RECOMPUTE, SCHEDULES
from phalanx.errors import nearest_names
from phalanx.planner.emitters.base import Site, Writing
from phalanx.planner.emitters.toml_text import toml_text
from phalanx.planner.importers import torchtitan as reader
from phalanx.planner.importers.foreign import ForeignPlan

VERSION = "0.2.2"  # the last that reads TOML; from 0.3.0 on a job is Python
FILE = "torchtitan.toml"
_SCHEDULE_NAMES = {schedule: name for name, (schedule, _) in reader.SCHEDULES.items()}
_ROTATE = {"all-gather": "allgather", "ring": "alltoall"}
_DATA = ("c4", "c4_test")


def write(plan: ForeignPlan, site: Site) -> Mapping[str, str]:
    """The file.

    Raises:
        PlanError: `emit/impossible` for a model that torchtitan does not list, adapters, a sharding
            of moments alone, an ulysses exchange, fp16 or fp4.
    """
    writing = Writing("torchtitan", VERSION, plan)
    name, flavour, layers = _model(writing)
    tables: dict[str, dict[str, Any]] = {
        "job": {"description": "planned by Phalanx"},
        "model": {"name": name, "flavor": flavour, **_converters(writing)},
        "optimizer": {"lr": plan.lr} if plan.lr else {},
        "training": _training(writing),
        "parallelism": _mesh(writing) | _pipeline(writing, layers),
        "activation_checkpoint": _recompute(writing),
        "compile": {"enable": True},
    }
    _data(writing)
    writing.lacks_fields("epochs")
    writing.lacks("model.hf_assets_path: a folder with the tokenizer's files of the model")
    how = f"{writing.torchrun(site)} -m torchtitan.train --job.config_file {FILE}"
    return {FILE: writing.header(f"Start: {how}") + "\n" + toml_text(tables)}


def _model(writing: Writing) -> tuple[str, str, int]:
    wanted = _bare(writing.plan.model or "")
    for (name, flavour), (published, layers) in reader.MODELS.items():
        if _bare(published) == wanted:
            return name, flavour, layers
    near = nearest_names(wanted, [_bare(each) for each, _ in reader.MODELS.values()])
    writing.require(False, "model", "torchtitan has no such model", near)
    raise AssertionError


def _bare(name: str) -> str:
    """Of a Hub name, a preset or a folder, without what does not change the sizes."""
    last = name.rstrip("/").rsplit("/", 1)[-1].lower().removeprefix("meta-")
    for ending in ("-instruct", "-base", "-it", "-chat"):
        last = last.removesuffix(ending)
    return last


def _converters(writing: Writing) -> dict[str, list[str]]:
    plan = writing.plan
    rule = "torchtitan trains all weights"
    writing.require(plan.method in (None, "pretrain", "full"), "method", rule, ["full", "pretrain"])
    words = ["bf16", "fp8", "fp32"]
    rule = "torchtitan multiplies in no such precision"
    writing.require(plan.precision in (None, *words), "precision", rule, words)
    return {"converters": ["quantize.linear.float8"]} if plan.precision == "fp8" else {}


def _training(writing: Writing) -> dict[str, Any]:
    plan, row = writing.plan, writing.row
    is_staged = row["pipeline"] > 1
    local = row["micro_rows"] * (row["num_micro"] if is_staged else 1)
    table: dict[str, Any] = {
        "local_batch_size": local,
        "global_batch_size": writing.step_rows,
        "seq_len": row["row_tokens"],
    }
    if plan.steps:
        table["steps"] = plan.steps
    if plan.master_dtype == "bfloat16":
        table["dtype"] = "bfloat16"
    if plan.precision == "fp32":
        table["mixed_precision_param"] = "float32"
    writing.only("offload", (0, 1))
    if row["offload"]:
        table["enable_cpu_offload"] = True
    data = writing.data()
    table["dataset"] = data if data in _DATA else "c4"
    if data and data not in _DATA:
        table["dataset_path"] = data
    return table


def _data(writing: Writing) -> None:
    if writing.plan.data not in _DATA:
        writing.lacks('the format of the data: the loader "c4" reads rows with a field "text"')


def _mesh(writing: Writing) -> dict[str, Any]:
    row = writing.row
    writing.only("zero", (0, 3))
    context, shard = row["context"], row["shard"]
    if row["zero"] == 0:
        rule = "replicas without sharding go with no other axis"
        alone = row["tensor"] == row["context"] == row["pipeline"] == 1 or row["data"] == 1
        writing.require(alone and context == 1, "zero", rule, [3])
    else:
        rule = f"weights are sharded over the {context} context ranks as well"
        writing.require(shard % context == 0, "shard", rule, [row["data"] * context])
    table: dict[str, Any] = {
        "data_parallel_replicate_degree": row["replicate"] if row["zero"] else row["data"],
        "data_parallel_shard_degree": shard // context if row["zero"] else 1,
        "tensor_parallel_degree": row["tensor"],
        "context_parallel_degree": context,
    }
    if row["zero"]:
        table["fsdp_reshard_after_forward"] = "never" if row["keeps_gathered"] else "always"
    if row["tensor"] > 1:
        rule = "torchtitan always splits tokens over the tensor axis"
        writing.require(bool(row["sequence_parallel"]), "sequence_parallel", rule, [True])
    if context > 1:
        kind = CONTEXT_KINDS[row["context_kind"]]
        rule = "torchtitan has no such exchange"
        writing.require(kind in _ROTATE, "context_kind", rule, sorted(_ROTATE))
        table["context_parallel_rotate_method"] = _ROTATE[kind]
    if row["expert"] > 1:
        rule = "inside an expert the tensor degree is 1 or that of the others"
        legal = sorted({1, row["tensor"]})
        writing.require(row["expert_tensor"] in legal, "expert_tensor", rule, legal)
        table["expert_parallel_degree"] = row["expert"]
        table["expert_tensor_parallel_degree"] = row["expert_tensor"]
    return table


def _pipeline(writing: Writing, layers: int) -> dict[str, Any]:
    row, at = writing.row, "pipeline_parallel_"
    if row["pipeline"] == 1:
        return {}
    schedule, rule = SCHEDULES[row["schedule"]], "torchtitan has no name for this schedule"
    writing.require(schedule in _SCHEDULE_NAMES, "schedule", rule, list(_SCHEDULE_NAMES))
    name = _SCHEDULE_NAMES[schedule]
    chunks = reader.SCHEDULES[name][1]
    table: dict[str, Any] = {
        f"{at}degree": row["pipeline"],
        f"{at}schedule": name,
        f"{at}microbatch_size": row["micro_rows"],
    }
    if row["virtual"] != chunks:
        rule = f"{name} has {chunks} to a rank"
        writing.require(chunks > 1 and name.startswith("Inter"), "virtual", rule, [chunks])
        stages = row["pipeline"] * row["virtual"]
        rule = f"{layers} layers are no multiple of {row['pipeline']} ranks x chunks"
        legal = [n for n in range(2, layers) if layers % (row["pipeline"] * n) == 0]
        writing.require(layers % stages == 0, "virtual", rule, legal[:2])
        table[f"{at}layers_per_stage"] = layers // stages
        table[f"{at}first_stage_less_layers"] = table[f"{at}last_stage_less_layers"] = 0
    return table


def _recompute(writing: Writing) -> dict[str, Any]:
    mode = RECOMPUTE[writing.row["recompute"]]
    by_operator = {"selective_ac_option": "op"} if mode == "selective" else {}
    return {"mode": mode, **by_operator}
