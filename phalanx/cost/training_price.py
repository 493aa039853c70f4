"""Seconds of the parts of a training step, from counts, speeds and efficiencies.

Seconds of a step, for micro-batches m, layers n of the fullest pipeline rank, schedule bubble q
    m (n t + t_head) + q t_mean + messages + exposed gathers and reductions + optimizer + host
Seconds t of a layer, forward: the longer of what the device and what the host takes
    device   products, attention, element-wise work, and the exchanges that nothing hides
    host     a launch per operator, calls and rounds of collectives inside the layer
    Between the two a power mean of order 4: kernels of one layer are not all bound by the same.
Backward: products twice (frozen ones once), attention 2.5 times, the rest twice; with full
recomputation the forward pass, exchanges included, once more; twice more where the backward pass is
in two parts, each of which computes again what it needs (`training_bubble.split_frac`).
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

from phalanx.cost.training_compute import ComputeWork
from phalanx.cost.training_count import StepWork
from phalanx.cost.training_efficiency import StepEfficiency
from phalanx.cost.training_plans import RECOMPUTE
from phalanx.cost.training_traffic import Wire
from phalanx.hardware import Machine

ATTENTION_BACKWARD = 2.5
_MANY_DOMAINS = 64.0  # of which the slowest is late in about every second micro-batch
_MIX = 4.0  # order of the mean of device and host
_REPEATED_LAUNCHES = 0.3  # of a layer's, under selective recomputation
_OPTIMIZER_BYTES = 30  # AdamW in float32: reads 4 values, writes 3 and the 16-bit weight
_GRADIENT_BYTES = 8  # of the whole gradient: cleared, and read for its norm
HOST_LINK_BYTES_PER_S = 25e9  # assumption: PCIe 4.0 x16, what offloaded moments cross
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


def price_step(work: StepWork, speeds: Speeds, rates: StepEfficiency) -> dict[str, Any]:
    """Parts of a step -> seconds. They are at least 0 and sum to the step."""
    plan = work.plan
    layer, repeated_s = _layer_parts(work, speeds, rates)
    head_s = _head_s(work, speeds, rates)
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
    again_s = plan["mean_layers"] * repeated_s
    idle = plan["bubble"] * (mean_rank_s - again_s) + fill / np.maximum(plan["virtual"], 1)
    idle = idle + plan["bubble_again"] * again_s / (1 + plan["split"])
    parts["bubble"] = np.maximum(idle, 0.0)
    parts["pipeline"] = _messages(work, speeds, rates)
    parts |= _data(work, speeds, rates, layers * layer_s)
    parts["optimizer"] = _optimizer(work, speeds, rates)
    parts["overhead"] = parts["overhead"] + plan["micro"] * _host_s(plan, rates) + rates.step_s
    return {name: value * rates.pace for name, value in parts.items()}


def _layer_parts(
    work: StepWork, speeds: Speeds, rates: StepEfficiency
) -> tuple[dict[str, Any], Any]:
    """Seconds of a mean layer, of one micro-batch, both passes; and what of them is recomputation,
    its exchanges included."""
    plan, traffic = work.plan, work.traffic
    is_full = np.where(plan["recompute"] == _FULL, 1.0, 0.0)
    is_selective = np.where(plan["recompute"] == _SELECTIVE, 1.0, 0.0)
    forward_s, backward_s, selective_s, attention_s = _device_seconds(work, speeds, rates)
    moved = replace(traffic.tensor, near_rounds=0.0, far_rounds=0.0)
    tensor_s = _exposed(_wire_s(moved, speeds, rates), rates.tensor_hidden, forward_s, rates)
    routing_s = _wire_s(traffic.expert, speeds, rates)
    expert_s = _exposed(routing_s, rates.expert_hidden, forward_s, rates)
    context_s, context_backward_s = (
        _exposed(_wire_s(wire, speeds, rates), rates.context_hidden, beside_s, rates)
        for wire, beside_s in (
            (traffic.context, attention_s),
            (traffic.context_backward, ATTENTION_BACKWARD * attention_s),
        )
    )
    host_s = rates.launch_s * work.compute.launches + _tensor_waits(work, rates)
    there_s, back_s = (device_s + tensor_s + expert_s for device_s in (forward_s, backward_s))
    late_s = _mix(there_s, host_s) - there_s
    times = 1 + plan["split"]
    repeats, again = times * is_full, times * (is_full + _REPEATED_LAUNCHES * is_selective)
    recompute_s = repeats * forward_s + times * is_selective * selective_s
    parts = {
        "compute": forward_s + backward_s,
        "recompute": recompute_s,
        "tensor": tensor_s * (2 + repeats),
        "expert": expert_s * (2 + repeats),
        "context": context_s + context_backward_s,
        "overhead": late_s * (1 + again) + _mix(back_s, 2 * host_s) - back_s,
    }
    return parts, recompute_s + repeats * (tensor_s + expert_s) + again * late_s


def _device_seconds(
    work: StepWork, speeds: Speeds, rates: StepEfficiency
) -> tuple[Any, Any, Any, Any]:
    """Of a layer on the device: (forward, backward, what selective recomputation repeats,
    attention forward)."""
    trains, compute = work.plan["trains_all"], work.compute
    dense_s, dense_more_s = _products(work, speeds, rates)
    attention_s = _attention(work, speeds, rates)
    streamed = rates.stream * compute.stream_bytes + rates.routed * compute.routed_bytes
    stream_s = streamed / speeds.memory_bytes_per_s
    adapter_s = _adapters(compute, speeds, rates)
    forward_s = dense_s + attention_s + stream_s + adapter_s
    backward_s = dense_s * (1 + trains) + dense_more_s * trains + 2 * (stream_s + adapter_s)
    backward_s = backward_s + ATTENTION_BACKWARD * attention_s
    selective_s = (
        stream_s + work.plan["writes_scores"] * attention_s + rates.repeated_products * dense_s
    )
    heaviest = work.plan["imbalance"]
    return heaviest * forward_s, heaviest * backward_s, heaviest * selective_s, attention_s


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
    cast = rates.cast * compute.cast_bytes + rates.gated_cast * compute.gated_cast_bytes
    cast = cast * work.plan["is_narrow"]
    starts_s = rates.product_start_s * compute.products + rates.expert_start_s * compute.experts
    more = compute.weight_bytes + compute.expert_weight_bytes
    forward_s = flops_s + (moved + cast) / speeds.memory_bytes_per_s + starts_s
    return forward_s, more / speeds.memory_bytes_per_s


def _adapters(compute: ComputeWork, speeds: Speeds, rates: StepEfficiency) -> Any:
    flops_s = compute.adapter_flops / (speeds.attention_flops_per_s * rates.product)
    moved_s = rates.stream * compute.adapter_bytes / speeds.memory_bytes_per_s
    return rates.adapter * (flops_s + moved_s + rates.product_start_s * compute.adapters)


def _attention(work: StepWork, speeds: Speeds, rates: StepEfficiency) -> Any:
    """Fused: the causal half; with scores written out the whole square, and their bytes."""
    rate = speeds.attention_flops_per_s * rates.attention
    compute, is_unfused = work.compute, work.plan["writes_scores"]
    pairs = compute.attention_flops * (1 + is_unfused)
    pairs = pairs + rates.attention_start_tokens * compute.attention_per_token
    written = is_unfused * rates.scores * compute.score_bytes
    states_s = compute.state_flops / (speeds.attention_flops_per_s * rates.state)
    return pairs / rate + states_s + written / speeds.memory_bytes_per_s


def _head_s(work: StepWork, speeds: Speeds, rates: StepEfficiency) -> Any:
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
    """Of a step: every chunk's activations there and their gradients back, as far as nothing hides
    them; 0 without a pipeline."""
    plan = work.plan
    each_s = _wire_s(work.traffic.pipeline, speeds, rates) * (1 - rates.pipeline_hidden)
    crossings = 2 * plan["virtual"] * (plan["micro"] + plan["bubble"])
    return np.where(plan["pipeline"] > 1, crossings * each_s, 0.0)


def data_wires(work: StepWork, speeds: Speeds, rates: StepEfficiency) -> tuple[Any, Any]:
    """Seconds on the links of (all weights of a rank gathered, its gradients reduced) once."""
    in_bytes = work.traffic.reduce.resized(rates.gradient_bytes)
    gather_s = _wire_s(work.traffic.gather, speeds, rates)
    return gather_s, _wire_s(in_bytes, speeds, rates)


def context_wire(work: StepWork, speeds: Speeds, rates: StepEfficiency) -> Any:
    """Seconds on the links of the context axis, of a mean layer and a micro-batch, both passes."""
    return _wire_s(work.traffic.context + work.traffic.context_backward, speeds, rates)


def _data(work: StepWork, speeds: Speeds, rates: StepEfficiency, micro_s: Any) -> dict[str, Any]:
    """Gathers and reductions of the data axis.

    Of every micro-batch where they are sharded (weights: zero 3, gradients: zero 2 and 3), else
    once a step, beside the first and the last micro-batch.
    """
    plan = work.plan
    gather_s, reduce_s = data_wires(work, speeds, rates)
    gathers = np.where(
        plan["zero"] == 3, plan["micro"] * (2.0 - np.minimum(plan["keeps_gathered"], 1)), 1.0
    )
    reductions = np.where(plan["zero"] >= 2, plan["micro"], 1.0)
    wire_s = gathers * gather_s + reductions * reduce_s
    beside_s = micro_s * reductions
    return {"data": _exposed(wire_s, rates.data_hidden, beside_s, rates)}


def _optimizer(work: StepWork, speeds: Speeds, rates: StepEfficiency) -> Any:
    plan = work.plan
    here = plan["updated"] * _OPTIMIZER_BYTES + plan["held"] * _GRADIENT_BYTES
    away = plan["updated"] * plan["offload"] * _OPTIMIZER_BYTES
    return rates.optimizer * here / speeds.memory_bytes_per_s + away / HOST_LINK_BYTES_PER_S
