"""Four axes from a budget of tokens, by the inequalities that sized Llama 3.

The search (`planner.search`) prices every plan; this says in five lines why one of them is natural,
and from which numbers. Source: Scaling Llama 3 Training with Efficient Parallelism Strategies, DOI
10.1145/3695053.3731410, section 5.1.

Symbols: G devices, U of them in a domain of fast links, T tokens of a step, S tokens of a sequence,
B = T / S sequences; t, c, p, d degrees of the tensor, context, pipeline and data axes.

Rules
    t c >= G / B      a data rank has T t c p / (S G) sequences, and a pipeline needs p of them
    t <= U            four exposed collectives a layer stay on fast links; the rest of the product
                      above is context parallelism
    p > 1             where the tokens of a rank, S / c, are fewer than FLOP/s over the network's
                      bytes/s: gathering weights for every micro-batch (2 FLOPs and 2 bytes a
                      parameter and token) would outlast its products
    p                 the least power of two at which a rank holds weights, gradients and the
                      results of products (what selective recomputation of the rest leaves)
    d = G / (t c p)
Differences: the paper says that p = 16 was needed to fit memory, not by which sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.cost.model_shape import ModelShape
from phalanx.cost.training_memory import training_memory
from phalanx.cost.training_plans import RECOMPUTE, SCHEDULES, TrainingPlans
from phalanx.errors import PlanError
from phalanx.hardware import Cluster
from phalanx.units import format_bytes


@dataclass(frozen=True)
class Sizing:
    """Degrees, and the inequalities that gave them.

    Attributes:
        tensor, context, pipeline, data: t, c, p, d.
        reasons: a line for each.
    """

    tensor: int
    context: int
    pipeline: int
    data: int
    reasons: Sequence[str]


def four_axes(shape: ModelShape, cluster: Cluster, *, step_tokens: int, seq_tokens: int) -> Sizing:
    """Size the axes.

    Args:
        step_tokens, seq_tokens: T, S.

    Raises:
        PlanError: `plan/illegal` where no power of two fits.
    """
    machine, devices = cluster.machine, cluster.num_devices
    num_seqs = step_tokens // seq_tokens
    if num_seqs < 1:
        rule = f"holds no sequence of {seq_tokens:,} tokens"
        raise PlanError("plan/illegal", "step_tokens", step_tokens, rule, legal=[seq_tokens])
    least = _power_of_two(devices / num_seqs)
    tensor = min(least, 2 ** (machine.devices_per_domain.bit_length() - 1))  # t <= U
    context = max(1, least // tensor)
    reasons = [
        f"t c >= G / B = {devices:,} / {num_seqs:,} = {devices / num_seqs:g}, with t <= "
        f"{machine.devices_per_domain} devices on fast links: t = {tensor}, c = {context}"
    ]
    per_byte = (machine.bf16_peak or machine.matmul).value / machine.network_bandwidth.value
    tokens = seq_tokens // context
    first = 2 if tokens < per_byte else 1
    sign = "<" if first > 1 else ">="
    reasons.append(
        f"S / c = {tokens:,} {sign} {per_byte:,.0f} FLOPs per byte of the network: weights "
        f"{'cannot' if first > 1 else 'can'} be gathered for every micro-batch behind its products"
    )
    pipeline, why = _pipeline(shape, cluster, tensor, context, seq_tokens, first)
    data = devices // (tensor * context * pipeline)
    reasons += [why, f"d = G / (t c p) = {data}"]
    return Sizing(tensor, context, pipeline, data, reasons)


def _power_of_two(value: float) -> int:
    """The least one that is not below."""
    return int(2 ** max(0, np.ceil(np.log2(value))))


def _pipeline(
    shape: ModelShape, cluster: Cluster, tensor: int, context: int, seq_tokens: int, first: int
) -> tuple[int, str]:
    most = min(cluster.num_devices // (tensor * context), _power_of_two(shape.num_layers))
    degrees = np.array([p for p in 2 ** np.arange(20) if first <= p <= most])
    data = cluster.num_devices // (tensor * context * degrees)
    plans = TrainingPlans(
        tensor=tensor,
        context=context,
        pipeline=degrees,
        data=data,
        shard=data * context,
        zero=1,
        schedule=SCHEDULES.index("1f1b"),
        sequence_parallel=1,
        row_tokens=seq_tokens,
        num_micro=degrees,
        recompute=RECOMPUTE.index("selective"),
        software="torch",
    )
    peaks = training_memory(shape, plans, cluster.machine).peak_bytes
    limit = cluster.machine.usable_bytes
    fitting = np.flatnonzero(peaks <= limit)
    if not len(fitting):
        rule = f"no pipeline fits {format_bytes(limit)} of a device, selectively recomputed"
        raise PlanError("plan/illegal", "cluster", str(cluster), rule)
    at = int(fitting[0])
    less = f", p = {degrees[at - 1]} needs {format_bytes(float(peaks[at - 1]))}" if at else ""
    return int(degrees[at]), (
        f"p = {degrees[at]} needs {format_bytes(float(peaks[at]))} of {format_bytes(limit)} with "
        f"selective recomputation{less}"
    )
