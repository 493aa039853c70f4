"""Bytes, collectives and memory of sharded data parallelism, as closed formulas.

Symbols, the same in every function:
    W  num_ranks            ranks that hold the model together
    F  shard_degree         ranks of one shard group
    R  = W / F              replicas of the shards (1: full sharding)
    N  len(unit_params)     units that are gathered and freed together
    psi_i  unit_params[i]   elements of unit i, in forward order; Psi their sum
    M  model_bytes          bytes of all parameters in the dtype in which they travel
    K  *_bytes              bytes per element: full (shards), low (gathered), reduce (gradients)

Sources
    [F] Zhao and others: PyTorch FSDP, PVLDB 16(12), 2023, arXiv 2304.11277, sections 3.2 and 4.4.
    [P] Patarasu, Yuan, JPDC 69(2), 2009: (W - 1) / W of the payload is what a rank has to send.

Differences: [F] prints the traffic across hosts of hybrid sharding as 2 M (W - 1) / (G W); a group
of W / G replicas sends 2 (M / G) (1 - G / W), which is `hybrid_traffic_bytes`; both agree for many
hosts. [F] counts parameters only; gradients and optimizer state are added here.
"""

from __future__ import annotations

from collections.abc import Sequence

ADAM_BYTES_PER_ELEMENT = 8  # two moments in float32


def replicated_traffic_bytes(model_bytes: float, num_ranks: int) -> float:
    """Bytes that a rank sends per step under plain data parallelism: 2 M (W - 1) / W.

    One all-reduce of the gradients ([F] 3.2.1, [P]).
    """
    return 2.0 * model_bytes * (num_ranks - 1) / num_ranks


def sharded_traffic_bytes(
    model_bytes: float, num_ranks: int, *, reshard: bool = True, kept_bytes: float = 0.0
) -> float:
    """Bytes that a rank sends per step under full sharding: 3 M (W - 1) / W, or 2 M (W - 1) / W.

    All-gather in the forward pass, again in the backward pass with `reshard`, and a reduce-scatter
    of gradients of the parameters' dtype ([F] 3.2.1).

    Args:
        kept_bytes: units that stay gathered between the passes although the others are given back
            (the root), and therefore travel once less.
    """
    again = model_bytes - kept_bytes if reshard else 0.0
    return (2.0 * model_bytes + again) * (num_ranks - 1) / num_ranks


def hybrid_traffic_bytes(
    model_bytes: float, num_ranks: int, shard_degree: int, *, reshard: bool = True
) -> tuple[float, float]:
    """Bytes that a rank sends per step inside its shard group, and between replicas.

    Inside: full sharding over F ranks. Between: an all-reduce of the gradient shard over R
    replicas, 2 (M / F) (R - 1) / R ([F] 3.2.2, see Differences above).
    """
    replicas = num_ranks // shard_degree
    inside = sharded_traffic_bytes(model_bytes, shard_degree, reshard=reshard)
    return inside, replicated_traffic_bytes(model_bytes / shard_degree, replicas)


def printed_cross_host_bytes(model_bytes: float, num_ranks: int, per_host: int) -> float:
    """Traffic across hosts of hybrid sharding as [F] 3.2.2 prints it: 2 M (W - 1) / (G W)."""
    return replicated_traffic_bytes(model_bytes, num_ranks) / per_host


def num_collectives(
    num_units: int, *, reshard: bool = True, replicas: int = 1, num_kept: int = 1
) -> dict[str, int]:
    """Collectives of one step with one micro-batch, by kind.

    N gathers forward; with `reshard` N - num_kept again backward; N reduce-scatters; with replicas
    N all-reduces. One unit kept (the root): 3 N - 1 in all, 2 N without reshard.
    """
    gathers = num_units + (num_units - num_kept if reshard else 0)
    reductions = num_units if replicas > 1 else 0
    return {"all_gather": gathers, "reduce_scatter": num_units, "all_reduce": reductions}


def gathered_params(unit_params: Sequence[int], *, reshard: bool = True, prefetch: int = 0) -> int:
    """Most elements that are gathered at once: (1 + p) max psi with p units of prefetch, at most
    Psi, and Psi without reshard ([F] 3.2.1; p by the rate limit of 3.4)."""
    total = sum(unit_params)
    return min(total, (1 + prefetch) * max(unit_params)) if reshard else total


def parameter_peak_bytes(
    unit_params: Sequence[int],
    shard_degree: int,
    *,
    full_bytes: float,
    low_bytes: float,
    reshard: bool = True,
    prefetch: int = 0,
) -> float:
    """Peak memory of parameters on a rank: K_full Psi / F + K_low max psi ([F] 4.4).

    Prefetch and reshard change the second term, see `gathered_params`.
    """
    gathered = gathered_params(unit_params, reshard=reshard, prefetch=prefetch)
    return full_bytes * sum(unit_params) / shard_degree + low_bytes * gathered


def state_peak_bytes(
    unit_params: Sequence[int],
    shard_degree: int,
    *,
    full_bytes: float,
    low_bytes: float,
    reduce_bytes: float,
    reshard: bool = True,
    prefetch: int = 0,
) -> float:
    """Parameters, gradients and Adam's moments of a rank at their peak, without activations.

    `parameter_peak_bytes` + K_full Psi / F (gradient shards) + 8 Psi / F (moments) + K_reduce max
    psi (the gradient of the unit that is reduced). The last three terms are ours.
    """
    parameters = parameter_peak_bytes(
        unit_params,
        shard_degree,
        full_bytes=full_bytes,
        low_bytes=low_bytes,
        reshard=reshard,
        prefetch=prefetch,
    )
    shards = (full_bytes + ADAM_BYTES_PER_ELEMENT) * sum(unit_params) / shard_degree
    return parameters + shards + reduce_bytes * max(unit_params)
