"""A priced step taken apart: seconds of the passes of one layer and of the head, for plans that are
played. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.cost.model_shape import ModelShape
from phalanx.cost.training_bubble import split_frac, stage_layers
from phalanx.cost.training_plans import RECOMPUTE

OF_LAYERS = ("compute", "recompute", "tensor", "expert", "context", "overhead")
FORWARD_SHARE = {"pretrain": 1 / 3, "full": 1 / 3, "lora": 0.47}
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
