"""Seconds of a training step on devices that are not here: a roofline of operators and links.

`cost.training` prices a step from rates that were measured on the spot; this prices the same step
from what a data sheet and a matrix-product benchmark say. Symbols as there.

Seconds of an operator on a micro-batch of n tokens (N targets for the head)
    max(FLOPs / matmul rate, bytes / memory bandwidth, one launch)
    bytes: its weights, and its result written and read once (backward: twice that)
    Source: Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009; the launch is ours.
Seconds of a collective: `cost.collectives`, ring; over two levels where a group leaves a domain.
Seconds of a step
    max(compute + exchanges of activations, gathers + reductions) + the first gather
    Gathers and reductions of data parallelism run beside compute (arXiv 2304.11277, section 3.3);
    exchanges inside layers stand between two products and hide behind nothing.

What is not in it, and is left to `cost.efficiency`: kernels slower than the best matrix product,
softmax and other work that no FLOP counts, pauses of the host, congestion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from phalanx.cost.collectives import hierarchical_s, ring_s
from phalanx.cost.step_memory import Unit, is_split_by_token, shard_spec
from phalanx.cost.step_work import Workload
from phalanx.mesh import Mesh
from phalanx.models.config import DTYPE_BYTES, DecoderConfig
from phalanx.models.operators import operators
from phalanx.policy import Exchange, Spec

REDUCE_BYTES = 4  # gradients are summed in float32
# AdamW in float32: reads weight, gradient and two moments, writes weight and moments
_OPTIMIZER_BYTES = 28
_REPEATED_BY_SELECTIVE = ("norm", "gate")  # `engines.recompute`
BOUNDS = ("compute", "bandwidth", "launches")


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """What one kind of device and its links reach.

    Attributes:
        flops_per_s: sustained matrix products.
        memory_bytes_per_s: of device memory.
        launch_s: least time of an operator.
        devices_per_domain: consecutive ranks that share the fast links.
        link_bytes_per_s, link_latency_s: inside a domain, per direction and device.
        network_bytes_per_s, network_latency_s: between domains.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float
    devices_per_domain: int
    link_bytes_per_s: float
    link_latency_s: float
    network_bytes_per_s: float
    network_latency_s: float

    def collective_s(
        self, collective: str, payload_bytes: float, degree: int, stride: int = 1
    ) -> float:
        """Seconds of a ring over `degree` ranks that stand `stride` apart."""
        if degree == 1 or not payload_bytes:
            return 0.0
        near = (self.link_bytes_per_s, self.link_latency_s)
        far = (self.network_bytes_per_s, self.network_latency_s)
        if degree * stride <= self.devices_per_domain:
            return ring_s(collective, payload_bytes, degree, *near)
        per_node = self.devices_per_domain // stride
        if per_node <= 1:
            return ring_s(collective, payload_bytes, degree, *far)
        return hierarchical_s(
            collective,
            payload_bytes,
            ceil(degree / per_node),
            per_node,
            node_bytes_per_s=near[0],
            net_bytes_per_s=far[0],
            node_latency_s=near[1],
            net_latency_s=far[1],
        )


class OperatorGroup(NamedTuple):
    """Operators of a rank that cost the same.

    Attributes:
        op: kind, as `models.operators` names it.
        number: how many there are.
        flops, backward_flops: per token.
        weight_bytes: that one of them reads.
        out_bytes: of its result, per token.
        in_layer: whether `full` recomputation repeats it.
        has_backward: whether gradients pass through it.
        token_share: part of a rank's tokens that it computes.
    """

    op: str
    number: int
    flops: float
    backward_flops: float
    weight_bytes: float
    out_bytes: float
    in_layer: bool
    has_backward: bool
    token_share: float


def operator_groups(config: DecoderConfig, work: Workload) -> tuple[OperatorGroup, ...]:
    """A rank's operators, equal ones together.

    Args:
        config: a rank's sizes (`cost.local_shapes`).
    """
    listed = operators(config, document_tokens=work.document_tokens, lora=work.lora)
    adapted = [op.layer for op in listed if op.num_trained and op.layer is not None]
    kept_from = min(adapted, default=config.num_layers) if work.lora else -1
    found: Counter[tuple] = Counter()
    for op in listed:
        if op.op == "rope":  # one table for all layers
            continue
        # an embedding reads the rows of its tokens, which its result counts
        weight_bytes = 0.0 if op.op == "embedding" else float(op.weight_bytes)
        found[
            (
                op.op,
                op.flops_per_token,
                op.backward_flops_per_token,
                weight_bytes,
                op.out_bytes_per_token,
                op.layer is not None,
                op.layer is not None and op.layer >= kept_from,
                1.0 / work.tensor_degree if is_split_by_token(op, work) else 1.0,
            )
        ] += 1
    return tuple(OperatorGroup(key[0], count, *key[1:]) for key, count in found.items())


def exchange_counts(
    config: DecoderConfig, specs: Sequence[Spec], recompute: str
) -> dict[str, float]:
    """Collective -> exchanges of activations of one micro-batch, by the rules of tensor specs.

    With `full` recomputation the forward ones of the blocks happen twice.
    """
    counts: dict[str, float] = {}
    blocks = {f"model.layers.0.{block}": config.num_layers for block in ("self_attn", "mlp")}
    for spec in specs:
        for module, times in (blocks | {"model.embed_tokens": 1, "lm_head": 1}).items():
            rule = spec.rule_for(module)
            for exchange in rule.exchanges if rule else ():
                again = recompute == "full" and exchange.phase == "F" and module in blocks
                times_each = times * _moves_activations(exchange) * (1 + again)
                counts[exchange.collective] = counts.get(exchange.collective, 0.0) + times_each
    return counts


def _moves_activations(exchange: Exchange) -> bool:
    return exchange.of in ("activations", "inputs")


@dataclass(frozen=True)
class StepSeconds:
    """One step.

    Attributes:
        parts: compute, recompute, optimizer, exchange, gather, reduce -> seconds.
        bound: what compute waits for ("compute", "bandwidth", "launches") -> seconds.
        first_gather_s: of the unit that nothing runs beside.
    """

    parts: Mapping[str, float]
    bound: Mapping[str, float]
    first_gather_s: float

    @property
    def busy_s(self) -> float:
        """Compute and what it has to wait for."""
        return sum(self.parts[name] for name in ("compute", "recompute", "optimizer", "exchange"))

    @property
    def beside_s(self) -> float:
        """Traffic that runs beside compute."""
        return self.parts["gather"] + self.parts["reduce"]

    @property
    def total_s(self) -> float:
        """The step."""
        return max(self.busy_s, self.beside_s) + self.first_gather_s

    @property
    def network_s(self) -> float:
        """Seconds of the step in which compute waits for links."""
        return self.total_s - self.busy_s + self.parts["exchange"]

    def shares(self) -> dict[str, float]:
        """What the step is spent on, as shares of it that sum to 1."""
        seconds = dict(self.bound) | {"links": self.network_s}
        return {name: value / self.total_s for name, value in seconds.items()}


def step_seconds(
    config: DecoderConfig,
    work: Workload,
    groups: Sequence[OperatorGroup],
    units: Sequence[Unit],
    specs: Sequence[Spec],
    rates: DeviceRates,
    *,
    mesh: Mesh,
    recompute: str = "none",
) -> StepSeconds:
    """Price one step of the rank with the most work.

    Args:
        config: sizes of the whole model.
        groups: from `operator_groups`, of a rank.
        units: from `cost.step_memory.units_of`.
        specs: of the plan: data ("shard", "replicate") and tensor.
        mesh: data axes outside, tensor axis inside.
    """
    tensor = [spec for spec in specs if spec.family == "tensor"]
    parts = dict.fromkeys(("compute", "recompute"), 0.0)
    bound = dict.fromkeys(BOUNDS, 0.0)
    for part, which, priced_s in _priced(groups, work, rates, recompute):
        parts[part] += priced_s
        bound[which] += priced_s
    optimizer_s = sum(u.trained for u in units) * _OPTIMIZER_BYTES / rates.memory_bytes_per_s
    bound["bandwidth"] += optimizer_s
    gathers, first_gather_s = _gather_seconds(units, work, specs, rates, mesh)
    row_bytes = work.row_tokens * config.hidden_size * DTYPE_BYTES[config.dtype]
    exchange_s = work.num_items * sum(
        count * rates.collective_s(kind, row_bytes, work.tensor_degree)
        for kind, count in exchange_counts(config, tensor, recompute).items()
    )
    seconds = parts | {
        "optimizer": optimizer_s,
        "exchange": exchange_s,
        "gather": gathers,
        "reduce": _reduce_seconds(units, work, specs, rates, mesh),
    }
    return StepSeconds(seconds, bound, first_gather_s)


def _priced(
    groups: Sequence[OperatorGroup], work: Workload, rates: DeviceRates, recompute: str
) -> Iterator[tuple[str, str, float]]:
    """(part, what bounds it, seconds of a step) of each group and pass."""
    for group in groups:
        count = group.token_share * (work.row_counted if group.op == "head" else work.row_tokens)
        times = group.number * work.num_items
        moved = 2 * count * group.out_bytes
        forward = _roofline(count * group.flops, group.weight_bytes + moved, rates)
        yield "compute", forward[0], times * forward[1]
        if group.has_backward:
            backward_bytes = group.weight_bytes * bool(group.backward_flops) + 2 * moved
            backward = _roofline(count * group.backward_flops, backward_bytes, rates)
            yield "compute", backward[0], times * backward[1]
        repeated = recompute == "full" or group.op in _REPEATED_BY_SELECTIVE
        if recompute != "none" and group.in_layer and group.has_backward and repeated:
            yield "recompute", forward[0], times * forward[1]


def _roofline(flops: float, moved_bytes: float, rates: DeviceRates) -> tuple[str, float]:
    """What an operator waits for, and how long it takes."""
    seconds = (flops / rates.flops_per_s, moved_bytes / rates.memory_bytes_per_s, rates.launch_s)
    longest = max(range(3), key=seconds.__getitem__)
    return BOUNDS[longest], seconds[longest]


def _strides(mesh: Mesh, specs: Sequence[Spec]) -> tuple[int, int, int, int]:
    """(degree, stride) of the shard axis and of the replicas."""
    shard = shard_spec([spec for spec in specs if spec.family == "data"])
    tensor = mesh.size // (mesh.degree("replicate") * mesh.degree("shard"))
    degree = mesh.degree(shard.axis) if shard else 1
    return degree, tensor, mesh.degree("replicate"), tensor * mesh.degree("shard")


def _gather_seconds(
    units: Sequence[Unit],
    work: Workload,
    specs: Sequence[Spec],
    rates: DeviceRates,
    mesh: Mesh,
) -> tuple[float, float]:
    """Seconds of all gathers of a step, and of one that nothing runs beside."""
    degree, stride, _, _ = _strides(mesh, specs)
    total, first = 0.0, 0.0
    for unit in units:
        times = unit.gathers(work.num_items)
        if times:
            seconds = rates.collective_s("all_gather", unit.gathered, degree, stride)
            total, first = total + times * seconds, max(first, seconds)
    return total, first


def _reduce_seconds(
    units: Sequence[Unit],
    work: Workload,
    specs: Sequence[Spec],
    rates: DeviceRates,
    mesh: Mesh,
) -> float:
    """Gradients of what is trained: scattered over shards, then summed over replicas."""
    degree, stride, replicas, apart = _strides(mesh, specs)
    seconds = 0.0
    for unit in units:
        if unit.num_trained:
            payload = unit.num_trained * REDUCE_BYTES
            times = work.num_items if unit.reduces_always else 1.0
            seconds += times * rates.collective_s("reduce_scatter", payload, degree, stride)
            held = unit.trained * REDUCE_BYTES
            seconds += rates.collective_s("all_reduce", held, replicas, apart)
    return seconds
