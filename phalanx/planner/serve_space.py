"""Which engines a cluster could be cut into: degrees, replicas, and why others are illegal."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from phalanx.cost.model_shape import ModelShape
from phalanx.hardware import Cluster

_MOST_TENSOR, _MOST_STAGES = 64, 16


@dataclass(frozen=True)
class EngineSpace:
    """N ways to cut a cluster into equal engines; columns [N].

    Attributes:
        tensor, pipeline, expert, attention_dp: degrees of an engine.
        replicas: engines.
        idle: devices that no engine takes.
        illegal: reason -> ways that it rules out.
    """

    tensor: np.ndarray
    pipeline: np.ndarray
    expert: np.ndarray
    attention_dp: np.ndarray
    replicas: np.ndarray
    idle: np.ndarray
    illegal: Counter[str]

    def __len__(self) -> int:
        return len(self.tensor)

    def degrees(self) -> dict[str, np.ndarray]:
        """As `serving_plans` takes them."""
        names = ("tensor", "pipeline", "expert", "attention_dp")
        return {name: getattr(self, name) for name in names}


def engine_space(shape: ModelShape, cluster: Cluster) -> EngineSpace:
    """All legal ways: powers of two, tensor parallelism within a domain, attention replicas and
    expert parallelism for mixtures only."""
    devices, domain = cluster.num_devices, cluster.machine.devices_per_domain
    heads = {layer.attention.num_heads for layer in shape.layers if layer.attention.kind != "none"}
    experts = {layer.feed_forward.num_experts for layer in shape.layers} - {0}
    illegal: Counter[str] = Counter()
    found: list[tuple[int, ...]] = []
    for tensor in _powers(min(devices, _MOST_TENSOR)):
        for pipeline in _powers(min(devices // tensor, _MOST_STAGES)):
            replicas_of_attention = _powers(devices // tensor // pipeline) if experts else [1]
            for attention_dp in replicas_of_attention:
                stage = tensor * attention_dp
                for expert in sorted({1, stage}) if experts else [1]:
                    reason = _reason(
                        *(tensor, pipeline, expert, domain, shape.num_layers, heads, experts)
                    )
                    if reason:
                        illegal[reason] += 1
                        continue
                    replicas, idle = divmod(devices, stage * pipeline)
                    found.append((tensor, pipeline, expert, attention_dp, replicas, idle))
    columns = np.asarray(found, dtype=int).reshape(len(found), 6).T
    names = ("tensor", "pipeline", "expert", "attention_dp", "replicas", "idle")
    return EngineSpace(**dict(zip(names, columns)), illegal=illegal)


def _reason(
    tensor: int,
    pipeline: int,
    expert: int,
    domain: int,
    layers: int,
    heads: set[int],
    experts: set[int],
) -> str:
    """Why a way is illegal; "" if it is not."""
    if tensor > domain:
        return f"tensor parallelism beyond a domain of {domain} devices"
    if any(count % tensor for count in heads):
        return "heads that the tensor degree does not divide"
    if pipeline > layers:
        return "more stages than layers"
    if any(count % expert for count in experts):
        return "experts that the expert degree does not divide"
    return ""


def _powers(most: int) -> list[int]:
    return [2**at for at in range(max(most, 1).bit_length())]
