"""Bytes of moving an actor's weights from its training layout to its generation layout.

Symbols as HybridFlow (arXiv 2409.19256, section 5.4): training p-t-d, generation p_g-t_g, M bytes
of the full weights, d_g = p t / (p_g t_g) ranks of a micro data group, which gathers them.

    received by a rank, strided groups     (t p - t_g p_g) / (t_g p_g t p) M = (d_g - 1) / (t p) M
    consecutive groups                     (t p - 1) / (t p) M
    DeepSpeed-Chat (all ranks)             (t p d - 1) / (t p d) M
    kept twice                             0 / M / (t p) / M / (t p d)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.errors import PlanError
from phalanx.hardware import Machine

GROUPINGS = ("strided", "consecutive", "all")


@dataclass(frozen=True)
class Resharding:
    """Of one rank, in bytes: numbers or arrays.

    Attributes:
        received_bytes: over links.
        peak_bytes: of weights while both layouts are there.
        twice_bytes: that it holds twice.
    """

    received_bytes: Any
    peak_bytes: Any
    twice_bytes: Any


def reshard(
    weights_bytes: float,
    *,
    pipeline: Any,
    tensor: Any,
    data: Any,
    serving_pipeline: Any,
    serving_tensor: Any,
    grouping: str = "strided",
) -> Resharding:
    """What a rank receives when weights change from the one layout to the other, in place.

    Args:
        weights_bytes: M, of one full copy.
        pipeline, tensor, data: p, t, d of training.
        serving_pipeline, serving_tensor: p_g, t_g of generation; must divide p and t.

    Raises:
        PlanError: `plan/illegal` for degrees that do not divide, or an unknown grouping.
    """
    p, t, pg, tg = (
        np.asarray(x, dtype=float) for x in (pipeline, tensor, serving_pipeline, serving_tensor)
    )
    if grouping not in GROUPINGS:
        rule = "no such grouping"
        raise PlanError("plan/illegal", "grouping", grouping, rule, legal=GROUPINGS)
    if np.any(p % pg) or np.any(t % tg):
        rule = "generation degrees must divide those of training"
        raise PlanError("plan/illegal", "weight sync", f"{p / pg}, {t / tg}", rule)
    cut, of_rank = p * t, weights_bytes / (p * t)
    if grouping == "strided":
        received = (cut - tg * pg) / (tg * pg * cut) * weights_bytes
        return Resharding(received, weights_bytes / (tg * pg), 0.0 * of_rank)
    ranks = cut if grouping == "consecutive" else cut * np.asarray(data, dtype=float)
    received = (ranks - 1) / ranks * weights_bytes
    return Resharding(received, weights_bytes + 0.0 * of_rank, weights_bytes / ranks)


def sync_s(
    weights_bytes: float, machine: Machine, engine_devices: Any, packed_bytes_per_s: float
) -> np.ndarray:
    """Seconds until engines of another program have new weights: packing one copy, and its wire.

    Args:
        engine_devices: that share one copy; each gets its part over its own network.
        packed_bytes_per_s: of one copy that is taken apart, renamed and handed over. verl's issue
            7060 counts 23.5 s of packing for 145 GB, and under 2 s on the wire.
    """
    share = weights_bytes / np.asarray(engine_devices, dtype=float)
    return weights_bytes / packed_bytes_per_s + share / machine.network_bandwidth.value
