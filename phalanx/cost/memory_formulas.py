"""Closed forms of published memory models, as their papers print them. No torch.

`training_memory` prices plans of real software; these are the formulas it is held against.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Number = Any  # a number, or an array of them


def layer_activation_bytes(
    seq: Number,
    batch: Number,
    hidden: Number,
    heads: Number,
    *,
    tensor: Number = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    flash: bool = False,
) -> Number:
    """Bytes that a GPT layer keeps for its backward pass, of one micro-batch on one rank.

    s b h (10 + 24/t + 5as/(ht)) for 16-bit activations and 1-byte dropout masks; sequence
    parallelism divides the 10 by t too, selective recomputation and fused attention drop the 5as/h,
    full recomputation keeps the layer's input alone. Source: Korthikanti et al., "Reducing
    Activation Recomputation in Large Transformer Models", Table 2.

    Args:
        flash: attention never writes its matrix (not in the paper).
    """
    per_split = tensor if sequence_parallel else 1
    if recompute == "full":
        return seq * batch * hidden * 2.0 / per_split
    matrix = 0.0 if flash or recompute == "selective" else 5.0 * heads * seq / (hidden * tensor)
    return seq * batch * hidden * (10.0 / per_split + 24.0 / tensor + matrix)


def first_stage_layers(layers: Number, pipeline: Number, virtual: Number = 1) -> Number:
    """Layers' worth of activations on the first rank of 1F1B: L, or L (1 + (p-1)/(pv)).

    Source: Korthikanti et al., section 4.2.3.
    """
    excess = (pipeline - 1.0) / (pipeline * virtual)
    return layers * np.where(np.asarray(virtual) > 1, 1.0 + excess, 1.0)


def zero_bytes(
    params: Number,
    degree: Number,
    stage: int,
    *,
    weight: float = 2,
    grad: float = 2,
    moments: float = 12,
) -> Number:
    """Bytes of weights, gradients and optimizer states on one of `degree` data ranks.

    Stage 0 shards nothing, 1 the states, 2 and the gradients, 3 and the weights. Source:
    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    Figure 1: (2 + 2 + 12) bytes a parameter.
    """
    parts = ((weight, 3), (grad, 2), (moments, 1))
    return sum(params * each / (degree if stage >= first else 1) for each, first in parts)


def distributed_optimizer_bytes(params: Number, data: Number) -> Number:
    """6 + 12/d bytes a parameter: bf16 weights, fp32 gradients, sharded Adam and master weights.

    Source: the documentation of Megatron Core's distributed optimizer.
    """
    return zero_bytes(params, data, 1, weight=2, grad=4, moments=12)
