"""A sync rule: islands train alone and take the mean of their weights every H steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.action import Action, Collective, Compute
from phalanx.policy import Event, React, View
from phalanx.registry import Source, register


@register(
    "sync",
    "local-sgd",
    grain="step",
    source=Source("Local SGD Converges Fast and Communicates Little", "arXiv 1805.09767"),
)
@dataclass(frozen=True, kw_only=True)
class LocalSgd(React):
    """After every `period` inner steps all islands replace their weights by the mean.

    Symbols: H = `period`; b = view.facts["model_bytes"]; K = islands.
    Costs: b bytes of payload per rank every H steps, nothing hidden: all wait.
    Source: arXiv 1805.09767, algorithm 1.
    Differences and limits: no momentum is exchanged; a lost island is simply not counted.
    """

    period: int
    axis: str = "island"

    def start(self, view: View) -> None:
        return None

    def on(self, state: Any, events: Sequence[Event], view: View) -> list[Action]:
        steps = [event.item for event in events if event.kind == "step"]
        if not steps or steps[-1] % self.period:
            return []
        mean = Collective(
            collective="all_reduce",
            axis=self.axis,
            lane="compute",  # in the way of the next step on purpose
            label=f"mean@{steps[-1]}",
            tensor="weights",
            payload_bytes=view.facts["model_bytes"],
            epoch=view.epoch,
        )
        divide = Compute(op="weights.divide", batch={"by": view.mesh.degree(self.axis)})
        return [mean, divide]
