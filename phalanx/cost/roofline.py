"""Prices from a few rates: work over speed, bytes over bandwidth, whichever is longer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.action import Collective, Compute, Move, Send
from phalanx.cost.collectives import ALGORITHMS
from phalanx.errors import PlanError, nearest_names


@dataclass(frozen=True, kw_only=True)
class RooflineCost:
    """One kind of device, links that differ by mesh axis.

    Compute: t = max(flops / flops_per_s, moved_bytes / memory_bytes_per_s) + overhead_s. Source:
    Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009; the overhead (a launch) is ours.
    Collective: `cost.collectives` with the axis' link. Transfer: latency_s + P / link_bytes_per_s.

    Attributes:
        flops_per_s: attainable speed (not the data sheet's peak unless you mean it).
        memory_bytes_per_s: device memory, read and written together.
        link_bytes_per_s: per direction and device; one number, or axis -> number.
        copy_bytes_per_s: between device and host (None: Move is not priced).
        latency_s: of one step on a link; one number, or axis -> number.
        overhead_s: added to every compute.
        algorithm: "ring" or "tree".

    Raises:
        PlanError: `plan/illegal` for a rate that is not positive, an unknown algorithm, or an axis
            without a link speed.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float | Mapping[str, float]
    copy_bytes_per_s: float | None = None
    latency_s: float | Mapping[str, float] = 0.0
    overhead_s: float = 0.0
    algorithm: str = "ring"

    def __post_init__(self) -> None:
        rates: dict[str, float] = {
            "flops_per_s": self.flops_per_s,
            "memory_bytes_per_s": self.memory_bytes_per_s,
        }
        if self.copy_bytes_per_s is not None:
            rates["copy_bytes_per_s"] = self.copy_bytes_per_s
        links = self.link_bytes_per_s
        named = links.items() if isinstance(links, Mapping) else [("", links)]
        rates |= {f"link_bytes_per_s.{axis}".rstrip("."): rate for axis, rate in named}
        for name, rate in rates.items():
            if not rate > 0:
                raise PlanError("plan/illegal", f"cost.{name}", rate, "a rate must be positive")
        if self.algorithm not in ALGORITHMS:
            rule, legal = "no such algorithm", sorted(ALGORITHMS)
            raise PlanError("plan/illegal", "cost.algorithm", self.algorithm, rule, legal=legal)

    def _of_axis(self, name: str, axis: str) -> float:
        value = getattr(self, name)
        if not isinstance(value, Mapping):
            return value
        if axis not in value:
            legal = nearest_names(axis, value)
            raise PlanError("plan/illegal", f"cost.{name}", axis, "no such axis", legal=legal)
        return value[axis]

    def compute_s(self, action: Compute, rank: int) -> float:
        """max(flops / speed, bytes / bandwidth) + overhead, seconds."""
        work_s = action.flops / self.flops_per_s
        return max(work_s, action.moved_bytes / self.memory_bytes_per_s) + self.overhead_s

    def collective_s(self, action: Collective, members: Sequence[int]) -> float:
        """The algorithm's formula over `len(members)`, seconds."""
        rate = self._of_axis("link_bytes_per_s", action.axis)
        latency_s = self._of_axis("latency_s", action.axis)
        price = ALGORITHMS[self.algorithm]
        return price(action.collective, action.payload_bytes, len(members), rate, latency_s)

    def transfer_s(self, action: Send, source: int, target: int) -> float:
        """latency + payload / bandwidth, seconds."""
        rate = self._of_axis("link_bytes_per_s", action.axis)
        return self._of_axis("latency_s", action.axis) + action.payload_bytes / rate

    def transfer_latency_s(self, action: Send, source: int, target: int) -> float:
        """The axis' latency, seconds."""
        return self._of_axis("latency_s", action.axis)

    def move_s(self, action: Move, rank: int) -> float:
        """payload / copy_bytes_per_s, seconds."""
        if self.copy_bytes_per_s is None:
            rule = "a copy between memories needs a rate"
            raise PlanError("plan/illegal", "cost.copy_bytes_per_s", None, rule)
        return action.payload_bytes / self.copy_bytes_per_s

    def rank_class(self, rank: int) -> int:
        """All devices are alike, and links differ by axis only."""
        return 0
