"""Closed forms of GPT training: parameters, FLOPs of an iteration, bubbles, days.

They take numbers or arrays. Symbols: B sequences of an iteration, s tokens of one, l layers, h
hidden size, V vocabulary, p pipeline ranks, m micro-batches, v model chunks of a rank.

Sources
    [M2] Narayanan et al.: Efficient Large-Scale Language Model Training on GPU Clusters Using
        Megatron-LM, SC'21, arXiv 2104.04473: equations 2 (parameters), 3 (FLOPs with full
        recomputation) and 4 (time), section 2.2 (bubbles).
    [M3] Korthikanti et al.: Reducing Activation Recomputation in Large Transformer Models,
        MLSys'23, arXiv 2205.05198: equations 7 (model FLOPs) and 8 (hardware FLOPs).
Both count attention without leaving out its causal half, and a feed-forward width of 4 h.
"""

from __future__ import annotations

from typing import Any

from phalanx.cost.training_plans import RECOMPUTE
from phalanx.errors import PlanError, nearest_names

SECONDS_PER_DAY = 86_400.0


def gpt_params(layers: Any, hidden: Any, vocab: Any, seq: Any) -> Any:
    """Parameters of a GPT, 12 l h^2 (1 + 13 / 12h + (V + s) / 12lh) [M2, equation 2]."""
    return (
        12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocab + seq) / (12 * layers * hidden))
    )


def model_flops(batch: Any, seq: Any, layers: Any, hidden: Any, vocab: Any) -> Any:
    """FLOPs that an iteration needs, whatever is recomputed [M3, equation 7].

    72 B l s h^2 (1 + s / 6h + V / 12hl)
    """
    products = 72 * batch * layers * seq * hidden**2
    return products * (1 + seq / (6 * hidden) + vocab / (12 * hidden * layers))


def hardware_flops(
    batch: Any, seq: Any, layers: Any, hidden: Any, vocab: Any, recompute: str = "selective"
) -> Any:
    """FLOPs that devices compute in an iteration.

    Args:
        recompute: "none": the model FLOPs; "selective": products of scores are repeated, which
            makes s / 6h s / 3h [M3, equation 8]; "full": so is the forward pass of all layers,
            96 B s l h^2 (1 + s / 6h + V / 16lh) [M2, equation 3].

    Raises:
        PlanError: `plan/illegal` for another kind of recomputation.
    """
    if recompute == "none":
        return model_flops(batch, seq, layers, hidden, vocab)
    if recompute == "selective":
        more = 72 * batch * layers * seq * hidden**2 * seq / (6 * hidden)
        return model_flops(batch, seq, layers, hidden, vocab) + more
    if recompute == "full":
        products = 96 * batch * layers * seq * hidden**2
        return products * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))
    legal = nearest_names(recompute, RECOMPUTE) or RECOMPUTE
    raise PlanError("plan/illegal", "recompute", repr(recompute), "no such kind", legal=legal)


def utilisation(flops: Any, step_s: Any, devices: Any, peak_flops_per_s: Any) -> Any:
    """Share of the peak that is reached: MFU of model FLOPs, HFU of hardware FLOPs."""
    return flops / (step_s * devices * peak_flops_per_s)


def bubble_frac(pipeline: Any, num_micro: Any, virtual: Any = 1) -> Any:
    """Idle over ideal time of 1F1B with equal stages, (p - 1) / (m v) [M2, section 2.2]."""
    return (pipeline - 1) / (num_micro * virtual)


def training_days(tokens: Any, params: Any, devices: Any, flops_per_s: Any) -> Any:
    """Days of a run with full recomputation, 8 T P / (n X) [M2, equation 4].

    Args:
        flops_per_s: X, what one device reaches, recomputation counted.
    """
    return 8 * tokens * params / (devices * flops_per_s) / SECONDS_PER_DAY
