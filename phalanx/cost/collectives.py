"""Bytes and seconds of collectives under the latency-bandwidth model.

Symbols, the same in every function:
    n               members of the group
    payload_bytes   P, the whole logical tensor on one rank (`action.Collective.payload_bytes`):
                    output of an all-gather, input of a reduce-scatter, the tensor of an all-reduce
                    or broadcast, everything that one rank holds before an all-to-all
    bytes_per_s     bandwidth of one member's link, per direction
    latency_s       time of one step with no bytes

Sources
    [T] Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH,
        IJHPCA 19(1), 2005, section 4, one subsection per collective (alpha = latency_s, beta = 1 /
        bytes_per_s). Their reduction term gamma is left out: an accelerator reduces faster than
        its link delivers.
    [P] Patarasu, Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations,
        JPDC 69(2), 2009: no algorithm sends less than 2 P (n - 1) / n per rank.
All results are formulas: congestion, protocol overhead and pipelining granularity are not in them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2

from phalanx.action import COLLECTIVES
from phalanx.errors import PlanError, nearest_names

# Ring steps and bytes sent by each member, in units of (n - 1) and P (n - 1) / n.
_RING_ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}
_WIRE = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0, "all_to_all": 1.0}
_WIRE |= {"broadcast": 1.0, "barrier": 0.0}


def require_collective(collective: str, where: str = "collective") -> None:
    """Raise `plan/illegal` with the nearest names unless `collective` is a known kind."""
    if collective not in COLLECTIVES:
        legal = nearest_names(collective, COLLECTIVES)
        raise PlanError("plan/illegal", where, repr(collective), "no such collective", legal=legal)


def wire_bytes(collective: str, payload_bytes: float, n: int) -> float:
    """Bytes that each member sends with a bandwidth-optimal algorithm.

    All-gather and reduce-scatter P (n - 1) / n; all-reduce twice that [P]; all-to-all keeps its
    own n-th; a broadcast sends P over n - 1 edges, so P (n - 1) / n on average; a barrier 0.

    Raises:
        PlanError: `plan/illegal` for an unknown kind.
    """
    if collective not in _WIRE:
        require_collective(collective)
    return _WIRE[collective] * payload_bytes * (n - 1) / n


def ring_s(
    collective: str, payload_bytes: float, n: int, bytes_per_s: float, latency_s: float
) -> float:
    """Ring: (n - 1) steps of P / n bytes each way round; an all-reduce goes round twice.

    [T] ring all-gather, its mirror image for reduce-scatter, both for all-reduce, n - 1 pairwise
    exchanges for all-to-all. Broadcast: fine pieces pipelined along the ring, (n - 1) latencies +
    P / bytes_per_s. Barrier: a dissemination barrier, ceil(log2 n) latencies.
    """
    require_collective(collective)
    if n <= 1:
        return 0.0
    if collective == "barrier":
        return ceil(log2(n)) * latency_s
    if collective == "broadcast":
        return (n - 1) * latency_s + payload_bytes / bytes_per_s
    wire_s = wire_bytes(collective, payload_bytes, n) / bytes_per_s
    return _RING_ROUNDS[collective] * (n - 1) * latency_s + wire_s


def tree_s(
    collective: str, payload_bytes: float, n: int, bytes_per_s: float, latency_s: float
) -> float:
    """Doubling and halving: log2(n) steps, the ring's bytes except where noted.

    [T] recursive doubling (all-gather), recursive halving (reduce-scatter), Rabenseifner's
    all-reduce (both); a binomial broadcast sends P in each of its steps, Bruck's all-to-all P / 2
    in each. Where n is no power of two the steps are rounded up.
    """
    require_collective(collective)
    if n <= 1:
        return 0.0
    steps = ceil(log2(n))
    if collective == "broadcast":
        return steps * (latency_s + payload_bytes / bytes_per_s)
    if collective == "all_to_all":
        return steps * (latency_s + payload_bytes / 2 / bytes_per_s)
    rounds = 2 if collective == "all_reduce" else 1
    return rounds * steps * latency_s + wire_bytes(collective, payload_bytes, n) / bytes_per_s


ALGORITHMS: dict[str, Callable[[str, float, int, float, float], float]] = {
    "ring": ring_s,
    "tree": tree_s,
}


def hierarchical_wire_bytes(
    collective: str, payload_bytes: float, num_nodes: int, per_node: int
) -> tuple[float, float]:
    """Bytes that each member sends inside its node and between nodes.

    All-gather: between nodes first (each member gathers the P / per_node of its peers), then
    inside (P); reduce-scatter in reverse; all-reduce = reduce-scatter inside, all-reduce of
    P / per_node between, all-gather inside. All-to-all: inside by destination's local index, then
    between, P each time. Broadcast: between nodes on one member's link, then inside.
    """
    outer = payload_bytes if collective in ("all_to_all", "broadcast") else payload_bytes / per_node
    inside = wire_bytes(collective, payload_bytes, per_node)
    return inside, wire_bytes(collective, outer, num_nodes)


def hierarchical_s(
    collective: str,
    payload_bytes: float,
    num_nodes: int,
    per_node: int,
    *,
    node_bytes_per_s: float,
    net_bytes_per_s: float,
    node_latency_s: float,
    net_latency_s: float,
    algorithm: str = "ring",
) -> float:
    """Two levels, one after the other, without overlap between them.

    The parts are those of `hierarchical_wire_bytes`, each by `algorithm` at its own level. With one
    node or one member per node it is the flat formula of that level.
    """
    level_s = ALGORITHMS[algorithm]
    outer = payload_bytes if collective in ("all_to_all", "broadcast") else payload_bytes / per_node
    inside = level_s(collective, payload_bytes, per_node, node_bytes_per_s, node_latency_s)
    return inside + level_s(collective, outer, num_nodes, net_bytes_per_s, net_latency_s)
