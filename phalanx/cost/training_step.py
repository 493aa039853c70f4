"""Seconds of a training step on devices that are not here, for many plans at once.

`count_step` counts what a step needs (`training_compute`, `training_traffic`, `training_bubble`);
`price_step` turns the counts into seconds with the machine's figures and the efficiencies of
`training_efficiency`. Both are sums over columns: ten thousand plans take a fraction of a second.

Seconds of a step, for micro-batches m, layers n of the fullest pipeline rank, schedule bubble q
    m (n t + t_head) + q t_mean + messages + exposed gathers and reductions + optimizer + host
Seconds t of a layer, forward: the longer of what the device and what the host takes
    device   products, attention, element-wise work, and the exchanges that nothing hides
    host     a launch per operator
    Between the two a power mean of order 4: kernels of one layer are not all bound by the same.
Backward: products twice (frozen ones once), attention 2.5 times, the rest twice; with full
recomputation the forward pass, exchanges included, once more.
Traffic that may hide runs beside a window of compute and slows it; what is longer than the window
waits (`_exposed`).

Sources: Narayanan et al., arXiv 2104.04473, sections 2 and 3 (pipelines, tensor axis); Zhao et al.,
arXiv 2304.11277, section 3 (sharded data); Dao, arXiv 2307.08691 (attention: 2.5 products backward
for one forward).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phalanx.cost.model_shape import ModelShape
from phalanx.cost.training_bubble import bubble_micro_batches, stage_layers
from phalanx.cost.training_compute import ComputeWork, compute_work
from phalanx.cost.training_efficiency import StepEfficiency, efficiency_of
from phalanx.cost.training_plans import RECOMPUTE, TrainingPlans
from phalanx.cost.training_traffic import Held, Traffic, Wire, tensor_blocks, traffic_of
from phalanx.hardware import Machine

ATTENTION_BACKWARD = 2.5
SCORE_PASSES = 6  # times that written scores move: product, mask and softmax, dropout, product
_MANY_DOMAINS = 64.0  # of which the slowest is late in about every second micro-batch
_MIX = 4.0  # order of the mean of device and host
_OPTIMIZER_BYTES = 30  # AdamW in float32: reads 4 values, writes 3 and the 16-bit weight
_GRADIENT_BYTES = 8  # of the whole gradient: cleared, and read for its norm
_HOST_LINK_BYTES_PER_S = 25e9  # assumption: PCIe 4.0 x16, what offloaded moments cross
_FULL, _SELECTIVE = RECOMPUTE.index("full"), RECOMPUTE.index("selective")


@dataclass(frozen=True)
class Speeds:
    """What one rank has; numbers, or arrays over rows.

    Attributes:
        product_flops_per_s: of the plans' precision; attention_flops_per_s: in 16 bits.
        memory_bytes_per_s, link_bytes_per_s, network_bytes_per_s: of the machine.
    """

    product_flops_per_s: Any
    attention_flops_per_s: Any
    memory_bytes_per_s: Any
    link_bytes_per_s: Any
    network_bytes_per_s: Any

    @classmethod
    def of(cls, machine: Machine, precision: str) -> Speeds:
        """From the figures of a machine."""
        return cls(
            machine.matmul_flops_per_s(precision),
            machine.matmul.value,
            machine.memory_bandwidth.value,
            machine.link_bandwidth.value,
            machine.network_bandwidth.value,
        )


@dataclass(frozen=True)
class StepWork:
    """What a step needs; all columns broadcast to [N]."""

    compute: ComputeWork
    traffic: Traffic
    plan: Mapping[str, Any]


@dataclass(frozen=True)
class StepTimes:
    """Seconds of N plans.

    Attributes:
        parts: what a step is spent on -> [N]; they sum to `total_s`.
        total_s, low_s, high_s: the expected step and the 90 % bar around it, [N].
        efficiency: the numbers used.
        source: where they come from.
    """

    parts: Mapping[str, np.ndarray]
    total_s: np.ndarray
    low_s: np.ndarray
    high_s: np.ndarray
    efficiency: StepEfficiency
    source: str

    def describe(self) -> str:
        """Where the efficiencies come from, in one line."""
        return self.source


def training_step(shape: ModelShape, plans: TrainingPlans, machine: Machine) -> StepTimes:
    """Price plans of one model on one kind of device.

    Args:
        shape: of the whole model.
        plans: a table of N plans; what is illegal is not checked here.
    """
    found = efficiency_of(machine, plans, shape.expert_params > 0)
    work = count_step(shape, plans, machine.devices_per_domain)
    speeds = Speeds.of(machine, plans.precision)
    priced = price_step(work, speeds, found.efficiency)
    columns = plans.shape or (1,)
    parts = {name: np.broadcast_to(value, columns) for name, value in priced.items()}
    total = np.sum(list(parts.values()), axis=0)
    low, high = total * found.low, total * found.high
    return StepTimes(parts, total, low, high, found.efficiency, found.describe())


def count_step(shape: ModelShape, plans: TrainingPlans, domain: int) -> StepWork:
    """FLOPs, bytes, rounds and launches of a step; no speeds yet."""
    compute = compute_work(shape, plans)
    fullest, last = stage_layers(shape.num_layers, plans.pipeline, plans.virtual)
    is_lora = plans.method == "lora"
    whole = Held(
        compute.dense_params * fullest + compute.edge_params, compute.expert_params * fullest
    )
    adapters = Held(compute.trained_params * fullest, 0.0)
    trained = adapters if is_lora else whole
    weight_bytes = plans.base_bits / 8 if is_lora else 2.0
    moves_all = plans.zero == 3
    gathered = Held(
        *(
            np.where(moves_all, a * weight_bytes, b * 2.0)
            for a, b in zip(whole, trained, strict=True)
        )
    )
    traffic = traffic_of(shape, plans, domain, gathered, trained)
    ranks = plans.data * plans.context
    shared = np.where(plans.zero > 0, np.minimum(plans.shard, ranks), 1)
    expert_ranks = np.maximum(ranks * plans.tensor / (plans.expert * plans.expert_tensor), 1.0)
    expert_shared = np.clip(shared * expert_ranks / ranks, 1.0, expert_ranks)
    plan = {
        "layers": fullest,
        "last_layers": last,
        "mean_layers": shape.num_layers / plans.pipeline,
        "micro": plans.num_micro,
        "pipeline": plans.pipeline,
        "tensor": plans.tensor,
        "tensor_calls": 2 * tensor_blocks(shape, plans),
        "virtual": plans.virtual,
        "domains": plans.devices / domain,
        "bubble": bubble_micro_batches(plans.schedule, plans.pipeline, plans.virtual),
        "zero": plans.zero,
        "keeps_gathered": plans.keeps_gathered,
        "recompute": plans.recompute,
        "imbalance": plans.imbalance,
        "offload": plans.offload,
        "trains_all": 0.0 if is_lora else 1.0,
        "is_narrow": 1.0 if plans.precision in ("fp8", "fp4") else 0.0,
        "updated": trained.dense / shared + trained.experts / expert_shared,
        "held": trained.dense + trained.experts,
    }
    return StepWork(compute, traffic, plan)


def price_step(work: StepWork, speeds: Speeds, rates: StepEfficiency) -> dict[str, Any]:
    """Parts of a step -> seconds. They are at least 0 and sum to the step."""
    plan = work.plan
    layer = _layer(work, speeds, rates)
    head_s = _head(work, speeds, rates)
    layer_s = sum(layer.values())
    whole_rank_s = plan["layers"] * layer_s
    last_rank_s = plan["last_layers"] * layer_s + head_s
    ends = last_rank_s > whole_rank_s
    layers = np.where(ends, plan["last_layers"], plan["layers"])
    times = plan["micro"] * layers
    parts = {name: times * value for name, value in layer.items()}
    parts["head"] = plan["micro"] * np.where(ends, head_s, 0.0)
    mean_rank_s = plan["mean_layers"] * layer_s + head_s / plan["pipeline"]
    # the first micro-batch passes through ranks that hold less than the fullest
    fill = np.where(plan["bubble"] > 0, mean_rank_s - np.maximum(whole_rank_s, last_rank_s), 0.0)
    idle = plan["bubble"] * mean_rank_s + fill / np.maximum(plan["virtual"], 1)
    parts["bubble"] = np.maximum(idle, 0.0)
    parts["pipeline"] = _messages(work, speeds, rates)
    parts |= _data(work, speeds, rates, layers * (layer["compute"] + layer["recompute"]))
    parts["optimizer"] = _optimizer(work, speeds, rates)
    parts["overhead"] = parts["overhead"] + plan["micro"] * _host_s(plan, rates) + rates.step_s
    return {name: value * rates.pace for name, value in parts.items()}


def _layer(work: StepWork, speeds: Speeds, rates: StepEfficiency) -> dict[str, Any]:
    """Parts of a mean layer, of one micro-batch, both passes."""
    plan, compute, traffic = work.plan, work.compute, work.traffic
    trains = plan["trains_all"]
    dense_s, dense_more_s = _products(work, speeds, rates)
    attention_s = _attention(compute, speeds, rates)
    streamed = rates.stream * compute.stream_bytes + rates.routed * compute.routed_bytes
    stream_s = streamed / speeds.memory_bytes_per_s
    adapter_s = _adapters(compute, speeds, rates)
    forward_s = plan["imbalance"] * (dense_s + attention_s + stream_s + adapter_s)
    backward_s = plan["imbalance"] * (
        dense_s * (1 + trains)
        + dense_more_s * trains
        + ATTENTION_BACKWARD * attention_s
        + 2 * (stream_s + adapter_s)
    )
    selective_s = plan["imbalance"] * (
        stream_s + rates.scores * attention_s + rates.repeated_products * dense_s
    )
    is_full = np.where(plan["recompute"] == _FULL, 1.0, 0.0)
    is_selective = np.where(plan["recompute"] == _SELECTIVE, 1.0, 0.0)
    moved = replace(traffic.tensor, near_rounds=0.0, far_rounds=0.0)
    tensor_s = _exposed(_wire_s(moved, speeds, rates), rates.tensor_hidden, forward_s, rates)
    expert_s = _exposed(
        _wire_s(traffic.expert, speeds, rates), rates.expert_hidden, forward_s, rates
    )
    context_s = sum(
        _exposed(_wire_s(wire, speeds, rates), rates.context_hidden, beside, rates)
        for wire, beside in (
            (traffic.context, attention_s),
            (traffic.context_backward, ATTENTION_BACKWARD * attention_s),
        )
    )
    device_s = forward_s + tensor_s + expert_s
    host_s = rates.launch_s * compute.launches + _tensor_waits(work, rates)
    passes = (1 + is_full + 0.3 * is_selective, 2.0)
    late_s = (_mix(device_s, host_s) - device_s) * passes[0]
    late_s = (
        late_s
        + _mix(backward_s + tensor_s + expert_s, passes[1] * host_s)
        - (backward_s + tensor_s + expert_s)
    )
    return {
        "compute": forward_s + backward_s,
        "recompute": is_full * forward_s + is_selective * selective_s,
        "tensor": tensor_s * (2 + is_full),
        "expert": expert_s * (2 + is_full),
        "context": context_s,
        "overhead": late_s,
    }


def _tensor_waits(work: StepWork, rates: StepEfficiency) -> Any:
    """Calls and rounds of the tensor axis; receives of a pipeline stand in their way."""
    wire, plan = work.traffic.tensor, work.plan
    rounds_s = wire.near_rounds * rates.round_s + wire.far_rounds * rates.network_round_s
    calls_s = np.where(plan["tensor"] > 1, plan["tensor_calls"] * rates.call_s, 0.0)
    return (rounds_s + calls_s) * np.where(plan["pipeline"] > 1, rates.crowding, 1.0)


def _mix(device_s: Any, host_s: Any) -> Any:
    """About the longer of two."""
    return (device_s**_MIX + host_s**_MIX) ** (1 / _MIX)


def _products(work: StepWork, speeds: Speeds, rates: StepEfficiency) -> tuple[Any, Any]:
    """(seconds of all products forward, more seconds of weight gradients)."""
    compute = work.compute
    rate = speeds.product_flops_per_s * rates.product
    flops_s = compute.product_flops / rate + compute.expert_flops / (rate * rates.expert)
    moved = rates.product_traffic * (compute.product_bytes + compute.expert_bytes)
    cast = rates.cast * work.plan["is_narrow"] * compute.cast_bytes
    starts_s = rates.product_start_s * (compute.products + compute.experts)
    more = compute.weight_bytes + compute.expert_weight_bytes
    forward_s = flops_s + (moved + cast) / speeds.memory_bytes_per_s + starts_s
    return forward_s, more / speeds.memory_bytes_per_s


def _adapters(compute: ComputeWork, speeds: Speeds, rates: StepEfficiency) -> Any:
    flops_s = compute.adapter_flops / (speeds.attention_flops_per_s * rates.product)
    moved_s = rates.stream * compute.adapter_bytes / speeds.memory_bytes_per_s
    return rates.adapter * (flops_s + moved_s + rates.product_start_s * compute.adapters)


def _attention(compute: ComputeWork, speeds: Speeds, rates: StepEfficiency) -> Any:
    """Fused: the causal half; with scores written out the whole square, and their bytes."""
    rate = speeds.attention_flops_per_s * rates.attention
    pairs = compute.attention_flops * (1 + rates.scores)
    pairs = pairs + rates.attention_start_tokens * compute.attention_per_token
    written = rates.scores * SCORE_PASSES * compute.score_bytes
    return (pairs + compute.state_flops) / rate + written / speeds.memory_bytes_per_s


def _head(work: StepWork, speeds: Speeds, rates: StepEfficiency) -> Any:
    """The head and the loss, forward and backward, of one micro-batch."""
    compute, trains = work.compute, work.plan["trains_all"]
    product_s = compute.head_flops / (speeds.attention_flops_per_s * rates.product)
    product_s = product_s + rates.product_traffic * compute.head_bytes / speeds.memory_bytes_per_s
    logits_s = rates.stream * compute.logit_bytes / speeds.memory_bytes_per_s
    edge_s = 2 * _wire_s(work.traffic.edge, speeds, rates)
    return work.plan["imbalance"] * (product_s * (2 + trains) + logits_s) + edge_s


def _wire_s(wire: Wire, speeds: Speeds, rates: StepEfficiency) -> Any:
    near_s = wire.near_bytes / (speeds.link_bytes_per_s * rates.link)
    far_s = wire.far_bytes / (speeds.network_bytes_per_s * rates.network)
    rounds_s = wire.near_rounds * rates.round_s + wire.far_rounds * rates.network_round_s
    return near_s + far_s + rounds_s


def _exposed(wire_s: Any, hidden: Any, beside_s: Any, rates: StepEfficiency) -> Any:
    """Seconds that traffic adds to a step in which a share of it may run beside compute."""
    inside_s = np.minimum(hidden * wire_s, beside_s)
    return wire_s - inside_s * (1 - rates.slowdown)


def _host_s(plan: Mapping[str, Any], rates: StepEfficiency) -> Any:
    """Of a micro-batch: the host's own work; in a pipeline with middle stages, which wait for
    messages of both sides, the time until the slowest of many domains has sent."""
    many = (plan["domains"] / _MANY_DOMAINS) ** 3
    waits = np.where(plan["pipeline"] > 2, many / (1 + many), 0.0)
    return rates.micro_s + rates.stall_s * waits


def _messages(work: StepWork, speeds: Speeds, rates: StepEfficiency) -> Any:
    """Between stages: every chunk's activations there and their gradients back."""
    plan = work.plan
    each_s = _wire_s(work.traffic.pipeline, speeds, rates) * (1 - rates.pipeline_hidden)
    crossings = 2 * plan["virtual"] * (plan["micro"] + plan["bubble"])
    return np.where(plan["pipeline"] > 1, crossings * each_s, 0.0)


def _data(work: StepWork, speeds: Speeds, rates: StepEfficiency, micro_s: Any) -> dict[str, Any]:
    """Gathers and reductions of the data axis: of every micro-batch where weights are sharded
    (zero 3), else once a step, beside the first and the last micro-batch."""
    plan = work.plan
    is_sharded = plan["zero"] == 3
    gather_s = _wire_s(work.traffic.gather, speeds, rates)
    elements = work.traffic.reduce
    in_bytes = Wire(
        elements.near_bytes * rates.gradient_bytes,
        elements.near_rounds,
        elements.far_bytes * rates.gradient_bytes,
        elements.far_rounds,
    )
    reduce_s = _wire_s(in_bytes, speeds, rates)
    often = np.where(is_sharded, plan["micro"], 1.0)
    gathers = np.where(is_sharded, 2.0 - np.minimum(plan["keeps_gathered"], 1), 1.0)
    beside_s = micro_s * often
    wire_s = often * (gathers * gather_s + reduce_s)
    return {"data": _exposed(wire_s, rates.data_hidden, beside_s, rates)}


def _optimizer(work: StepWork, speeds: Speeds, rates: StepEfficiency) -> Any:
    plan = work.plan
    here = plan["updated"] * _OPTIMIZER_BYTES + plan["held"] * _GRADIENT_BYTES
    away = plan["updated"] * plan["offload"] * _OPTIMIZER_BYTES
    return rates.optimizer * here / speeds.memory_bytes_per_s + away / _HOST_LINK_BYTES_PER_S
