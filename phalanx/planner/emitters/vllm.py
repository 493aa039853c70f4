"""A `vllm serve` script."""

from __future__ import annotations

from collections.abc import Mapping
from shlex import quote
from typing import Any

from phalanx.planner.emitters.base import Site, Writing
from phalanx.planner.importers.foreign import ForeignPlan

VERSION = "0.33.0"
FILE = "serve.sh"
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_QUANTISED = {(8, "fp8"): "fp8", (4, "fp4"): "modelopt_fp4", (4, "bf16"): "bitsandbytes"}


def write(plan: ForeignPlan, site: Site) -> Mapping[str, str]:
    """The script.

    Raises:
        PlanError: `emit/impossible` for a training plan, and for experts that are spread over
            other ranks than data and tensor together.
    """
    writing = Writing("vllm", VERSION, plan, role="serve")
    options = _mesh(writing) | _limits(plan) | _precision(writing)
    lines = [
        f"    --{key}{'' if value is True else f' {quote(str(value))}'}"
        for key, value in options.items()
    ]
    model = writing.model()
    how = f"Start: bash {FILE}, on a machine with {plan.devices or 1} devices"
    command = " \\\n".join([f"exec vllm serve {quote(model)}", *lines])
    return {FILE: f'#!/bin/bash\n{writing.header(how)}\n{command} "$@"\n'}


def _mesh(writing: Writing) -> dict[str, Any]:
    plan = writing.plan
    tensor, pipeline, data = plan.tensor or 1, plan.pipeline or 1, plan.replicate or 1
    taken = tensor * pipeline * data
    rule = f"tensor x pipeline x data are {taken}"
    writing.require(plan.devices in (None, taken), "devices", rule, [taken])
    options: dict[str, Any] = {"tensor-parallel-size": tensor}
    if pipeline > 1:
        options["pipeline-parallel-size"] = pipeline
    if data > 1:
        options["data-parallel-size"] = data
    expert = plan.expert or 1
    if expert > 1:
        rule = "experts are spread over all tensor x data ranks, or cut over the tensor ranks"
        writing.require(expert == tensor * data, "expert", rule, [1, tensor * data])
        options["enable-expert-parallel"] = True
    writing.require((plan.context or 1) == 1, "context", "prompts are not split over ranks", [1])
    return options


def _limits(plan: ForeignPlan) -> dict[str, Any]:
    pairs = {
        "max-model-len": plan.max_tokens,
        "max-num-seqs": plan.max_running,
        "max-num-batched-tokens": plan.max_step_tokens,
        "gpu-memory-utilization": plan.memory_frac,
    }
    options: dict[str, Any] = {key: value for key, value in pairs.items() if value}
    for name, on in (
        ("enable-prefix-caching", plan.caches_prefixes),
        ("enable-chunked-prefill", plan.chunks_prefill),
    ):
        if on is not None:
            options[name if on else f"no-{name}"] = True
    return options


def _precision(writing: Writing) -> dict[str, Any]:
    plan, options = writing.plan, dict[str, Any]()
    if plan.weight_bits and plan.weight_bits < 16:
        key = (plan.weight_bits, plan.precision or "bf16")
        rule = "no method of vLLM has these weights and products"
        writing.require(key in _QUANTISED, "weight_bits", rule, [8, 16])
        options["quantization"] = _QUANTISED[key]
    elif plan.precision:
        rule = "vLLM has it with quantised weights alone"
        writing.require(plan.precision in _DTYPES, "precision", rule, list(_DTYPES))
        options["dtype"] = _DTYPES[plan.precision]
    if plan.kv_bits and plan.kv_bits < 16:
        writing.require(plan.kv_bits in (8, 4), "kv_bits", "vLLM caches in no such size", [8, 16])
        options["kv-cache-dtype"] = "fp8" if plan.kv_bits == 8 else "nvfp4"
    return options
