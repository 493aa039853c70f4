"""Many serving plans at once: what runs on which devices, how it is cut and in which numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from phalanx.cost.model_shape import ModelShape
from phalanx.cost.serving_work import Column, ServingWork, stack_work, take_work, work_of
from phalanx.errors import JobError
from phalanx.hardware import Machine

# bytes of a weight; of 4-bit forms with their scales (one byte for 16 or 32 values)
WEIGHT_BYTES = {
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "fp4": 0.5625,
    "mxfp4": 0.53125,
    "int4": 0.53125,
}
# weights that are unpacked to bf16 before they are multiplied
WEIGHT_ONLY = ("int4", "mxfp4", "int8")
FOUR_BITS = ("fp4", "mxfp4", "int4")


@dataclass(frozen=True, kw_only=True)
class ServingPlans:
    """N plans, each of one model on its own devices. Columns are arrays [N].

    An engine has `pipeline` stages of `tensor * attention_dp` devices: attention runs on
    `attention_dp` replicas of `tensor` ranks with requests of their own, and all of a stage's
    devices share its experts, each expert on `devices / expert` of them.

    Attributes:
        work: sums over the layers of each plan's model.
        tensor, pipeline, expert, attention_dp: degrees.
        dense_bytes, expert_bytes, kv_bytes: of a weight outside and inside experts, and of a
            cached element.
        dense_flops, expert_flops, attention_flops: FLOP/s of a device in products with these
            weights and in attention: what it reaches with large matrices.
        bandwidth, link, network: bytes/s of a device's memory, to devices of its domain and to
            others.
        domain: devices of a domain.
        memory: bytes of a device that tensors may fill.
        accelerator, hardware, precision, family, generation: keys of the efficiency tables, as
            text: the device and its maker's generation, the numbers, the engine and its version.
    """

    work: ServingWork
    tensor: Column
    pipeline: Column
    expert: Column
    attention_dp: Column
    dense_bytes: Column
    expert_bytes: Column
    kv_bytes: Column
    dense_flops: Column
    expert_flops: Column
    attention_flops: Column
    bandwidth: Column
    link: Column
    network: Column
    domain: Column
    memory: Column
    accelerator: Column
    hardware: Column
    precision: Column
    family: Column
    generation: Column

    @property
    def stage_devices(self) -> Column:
        """Devices that hold one stage."""
        return self.tensor * self.attention_dp

    @property
    def devices(self) -> Column:
        """Of an engine."""
        return self.stage_devices * self.pipeline

    def take(self, rows: np.ndarray) -> ServingPlans:
        """Rows by mask or indices."""
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        return ServingPlans(work=take_work(self.work, rows), **columns)


_COLUMNS = tuple(each.name for each in fields(ServingPlans) if each.name != "work")


def serving_plans(
    shape: ModelShape,
    machine: Machine,
    *,
    tensor: Any = 1,
    pipeline: Any = 1,
    expert: Any = 1,
    attention_dp: Any = 1,
    precision: str = "bf16",
    kv_precision: str = "",
    software: str = "vllm",
) -> ServingPlans:
    """Plans of one model on one kind of device.

    Args:
        tensor, pipeline, expert, attention_dp: degrees, numbers or arrays of one length.
        precision: of the weights that the checkpoint quantises. Published 4-bit checkpoints of
            mixtures of experts quantise the experts alone and keep the rest in bf16.
        kv_precision: of cached elements ("": fp8 beside fp8 and fp4 weights, else bf16).
        software: "family:generation" of the engine, e.g. "vllm:0.19"; no generation: the newest.

    Raises:
        JobError: `job/bad-value` for degrees below 1 or an unknown precision.
    """
    degrees = {
        "tensor": tensor,
        "pipeline": pipeline,
        "expert": expert,
        "attention_dp": attention_dp,
    }
    columns = [np.atleast_1d(np.asarray(each, dtype=float)) for each in degrees.values()]
    columns = list(np.broadcast_arrays(*columns))
    for name, column in zip(degrees, columns, strict=True):
        if not (column >= 1).all():
            rule = "must be at least 1"
            raise JobError("job/bad-value", name, float(column.min()), rule, legal=[1])
    numbers = _numbers(shape, machine, precision, kv_precision)
    family, _, generation = software.partition(":")
    words = {
        "accelerator": machine.name,
        "hardware": f"{machine.vendor} {machine.generation}",
        "precision": precision,
        "family": family,
        "generation": generation,
    }
    count = columns[0].shape[0]
    work = work_of(shape)
    if count > 1:
        work = take_work(work, np.zeros(count, dtype=int))
    return ServingPlans(
        work=work,
        **dict(zip(degrees, columns, strict=True)),
        **{name: np.full(count, value) for name, value in numbers.items()},
        **{name: np.full(count, value, dtype=object) for name, value in words.items()},
    )


def join_plans(plans: Iterable[ServingPlans]) -> ServingPlans:
    """Tables of different models and devices below each other."""
    parts: Sequence[ServingPlans] = list(plans)
    columns = {name: np.concatenate([getattr(p, name) for p in parts]) for name in _COLUMNS}
    return ServingPlans(work=stack_work([part.work for part in parts]), **columns)


def _numbers(
    shape: ModelShape, machine: Machine, precision: str, kv_precision: str
) -> dict[str, float]:
    for name in filter(None, (precision, kv_precision)):
        if name not in WEIGHT_BYTES:
            rule = "no such precision"
            raise JobError("job/bad-value", "precision", name, rule, legal=sorted(WEIGHT_BYTES))
    has_experts = bool(shape.expert_params)
    dense = "bf16" if has_experts and precision in FOUR_BITS else precision
    cached = kv_precision or ("fp8" if precision in ("fp8", "fp4") else "bf16")
    return {
        "dense_bytes": WEIGHT_BYTES[dense],
        "expert_bytes": WEIGHT_BYTES[precision],
        "kv_bytes": WEIGHT_BYTES[cached],
        "dense_flops": _flops(machine, dense),
        "expert_flops": _flops(machine, precision),
        "attention_flops": _flops(machine, "bf16"),
        "bandwidth": machine.memory_bandwidth.value,
        "link": machine.link_bandwidth.value,
        "network": machine.network_bandwidth.value,
        "domain": float(machine.devices_per_domain),
        "memory": machine.usable_bytes,
    }


def _flops(machine: Machine, precision: str) -> float:
    multiplied = "bf16" if precision in WEIGHT_ONLY else precision
    return machine.matmul_flops_per_s(multiplied)
