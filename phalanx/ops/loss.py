"""Cross-entropy over a large vocabulary, in chunks of counted positions.

Legend: N counted positions, D model, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def counted_cross_entropy(
    hidden_SD: Tensor,
    head_VD: Tensor,
    counted_N: Tensor,
    targets_N: Tensor,
    *,
    num_counted_global: int | Tensor,
    soft_cap: float | None = None,
) -> Tensor:
    """Sum of -log p(target) over the counted positions, divided by the global number of them.

    The sum over all ranks and micro-batches is the mean over the global batch, whatever the layout.

    Args:
        hidden_SD: output of the decoder, after its last norm.
        head_VD: head weights (the embedding when tied).
        counted_N: rows of `hidden_SD` whose prediction counts.
        targets_N: the token that each of them should predict.
        num_counted_global: counted positions of the whole global batch.
        soft_cap: c of c * tanh(logits / c).
    """
    logits = F.linear(hidden_SD[counted_N], head_VD).float()
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    return F.cross_entropy(logits, targets_N, reduction="sum") / num_counted_global
