"""A priced step taken apart: seconds of the passes of one layer and of the head, for plans that are
played. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.cost.model_shape import ModelShape
from phalanx.cost.training_bubble import bubble_micro_batches, split_frac, stage_layers
from phalanx.cost.training_plans import CONTEXT_KINDS, RECOMPUTE, TrainingPlans
from phalanx.cost.training_step import StepTimes, StepWires

OF_LAYERS = ("compute", "recompute", "tensor", "expert", "context", "overhead")
FORWARD_SHARE = {"pretrain": 1 / 3, "full": 1 / 3, "lora": 0.47}
_RING = CONTEXT_KINDS.index("ring")
_EXCHANGES = ("tensor", "expert", "context", "overhead")


def counted_layers(shape: ModelShape, row: Mapping[str, Any], parts: Mapping[str, float]) -> float:
    """Layers that the formula's parts are of: of the fullest rank, or the last where its head makes
    it the busiest."""
    fullest, last = stage_layers(shape.num_layers, row["pipeline"], row["virtual"])
    return float(last if parts["head"] > 0 else fullest)


def head_seconds(shape: ModelShape, row: Mapping[str, Any], parts: Mapping[str, float]) -> float:
    """Of the head and a micro-batch, both passes."""
    if parts["head"] > 0:
        return parts["head"] / float(row["num_micro"])
    # the last rank is not the busiest, so the formula does not say
    layer_s = parts["compute"] / row["num_micro"] / counted_layers(shape, row, parts)
    per_layer = shape.product_flops_per_token / shape.num_layers
    return float(layer_s * shape.head_flops_per_token * row["counted_frac"] / per_layer)


@dataclass(frozen=True)
class LayerPasses:
    """Seconds of one micro-batch on a mean layer.

    Attributes:
        forward_s, backward_s: of a forward and of a whole backward pass.
        weight_s, input_s: of its two parts, where it is split: together they take longer than the
            whole, as much as is computed again.
    """

    forward_s: float
    backward_s: float
    weight_s: float
    input_s: float


def layer_passes(method: str, row: Mapping[str, Any], each: Mapping[str, float]) -> LayerPasses:
    """The passes of a layer from its parts.

    The forward pass has a third of the compute (without weight gradients 0.47 of it: attention's
    backward is 2.5 of its forward) and one of the passes of every exchange.

    Args:
        row: of the plan.
        each: the parts of a step that belong to layers -> seconds of a micro-batch on one, with all
            that is computed again.
    """
    split = float(split_frac(row["schedule"], row["pipeline"], row["num_micro"]))
    is_full = float(row["recompute"] == RECOMPUTE.index("full"))
    exchange_s = sum(each[name] for name in _EXCHANGES) / (2 + is_full * (1 + split))
    forward_s = FORWARD_SHARE[method] * each["compute"] + exchange_s
    again_s = each["recompute"] / (1 + split) + is_full * exchange_s
    backward_s = sum(each[name] for name in OF_LAYERS) - split * again_s - forward_s
    weight_s = each["compute"] / 3 * (method != "lora")
    return LayerPasses(forward_s, backward_s, weight_s + again_s, backward_s - weight_s)


@dataclass(frozen=True)
class PassPrices:
    """One price, by layer and micro-batch, as the actions of a program need it.

    Attributes:
        row: of the plan; parts: seconds of the step.
        layer_micros: layers times micro-batches that the parts of layers are of.
        once_s: of the host, of the step; head_s: of a micro-batch.
    """

    row: Mapping[str, Any]
    parts: Mapping[str, float]
    wires: StepWires
    layer_micros: float
    once_s: float
    head_s: float

    @classmethod
    def of(
        cls, shape: ModelShape, plan: TrainingPlans, times: StepTimes, wires: StepWires
    ) -> PassPrices:
        """Of a table of one plan."""
        row = {name: column[0] for name, column in plan.columns().items()}
        parts = {name: float(column[0]) for name, column in times.parts.items()}
        return cls(
            row,
            parts,
            wires,
            layer_micros=counted_layers(shape, row, parts) * float(row["num_micro"]),
            once_s=min(wires.step_s, parts["overhead"]),
            head_s=head_seconds(shape, row, parts),
        )

    @property
    def is_ring(self) -> bool:
        """Whether keys go round beside attention."""
        return int(self.row["context_kind"]) == _RING

    @property
    def gathers_always(self) -> bool:
        """Whether every micro-batch gathers its weights, so that the passes wait for them."""
        return bool(self.row["zero"] == 3)

    def each(self) -> dict[str, float]:
        """Seconds of a micro-batch on one layer, by part, with what holds its passes up."""
        found = {name: self.parts[name] / self.layer_micros for name in OF_LAYERS}
        stalled_s = self.parts["data"] if self.gathers_always else 0.0
        found["overhead"] += (stalled_s - self.once_s) / self.layer_micros
        return found

    def tensor_s(self) -> dict[str, float]:
        """Of the tensor axis on one layer: forward; and backward with what is computed again."""
        row = self.row
        split = float(split_frac(row["schedule"], row["pipeline"], row["num_micro"]))
        backward = 1 + (row["recompute"] == RECOMPUTE.index("full")) * (1 + split)
        forward_s = self.parts["tensor"] / self.layer_micros / (1 + backward)
        return {"F": forward_s, "B": backward * forward_s}

    def context_lane_s(self) -> float:
        """Of the context axis on one layer, on its lane."""
        exposed_s = self.parts["context"] / self.layer_micros
        if not self.is_ring:
            return exposed_s
        return _hidden_s(float(self.wires.context_s[0]), exposed_s, self.wires.slowdown)

    def data_hidden(self) -> float:
        """Share of the exchanges of weights and gradients that runs beside computing."""
        row, micro = self.row, float(self.row["num_micro"])
        gathers = micro * (2 - min(1, row["keeps_gathered"])) if self.gathers_always else 1.0
        wire_s = gathers * float(self.wires.gather_s[0])
        wire_s += (micro if row["zero"] >= 2 else 1.0) * float(self.wires.reduce_s[0])
        if not wire_s:
            return 0.0
        return _hidden_s(wire_s, self.parts["data"], self.wires.slowdown) / wire_s

    def message_s(self) -> float:
        """Of a message between stages, as far as nothing hides it."""
        row = self.row
        micro, chunks = float(row["num_micro"]), float(row["virtual"])
        idle = bubble_micro_batches(row["schedule"], row["pipeline"], chunks, micro)
        return self.parts["pipeline"] / (2 * chunks * (micro + float(idle)))


def _hidden_s(wire_s: float, exposed_s: float, slowdown: float) -> float:
    """Of an exchange, the seconds that run beside computing: exposed = wire - hidden (1 - slow)."""
    return max(0.0, (wire_s - exposed_s) / (1 - slowdown))
