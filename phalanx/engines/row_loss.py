"""A packed row through the model: what the decoder is called with, and the loss of what it returns.

Legend: S packed tokens, N targets, D model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.data.batches import MicroBatch
from phalanx.engines.trainer_model import TrainModel
from phalanx.engines.user_loss import LossFunction, user_loss
from phalanx.ops.dropout import DropoutKey
from phalanx.ops.placed import placed


class DropoutKeys(NamedTuple):
    """Seed and step of dropout masks."""

    seed: int
    step: int


def row_loss(
    model: TrainModel,
    row: MicroBatch,
    num_counted_global: int,
    device: torch.device,
    dropout: DropoutKeys | None = None,
    loss: LossFunction | None = None,
) -> Tensor:
    """Sum of the row's target losses over `num_counted_global`; cross-entropy without `loss`."""
    tokens_S, keywords = row_inputs(model, row, device, dropout)
    hidden_SD = model.decoder(tokens_S, **keywords)
    return hidden_loss(model, hidden_SD, row, num_counted_global, device, loss)


def row_inputs(
    model: TrainModel,
    row: MicroBatch,
    device: torch.device,
    dropout: DropoutKeys | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Tokens [S] that this rank computes of a row, and the keywords of `Decoder.forward`.

    Every stage of a pipeline takes the same keywords.
    """
    own, key = model.own_tokens(row), None
    if dropout is not None:
        key = DropoutKey(dropout.seed, dropout.step, placed(own.global_tokens_S, device))
    keywords = {
        "positions_S": placed(own.positions_S, device),
        "document_starts": own.document_starts,
        "dropout": key,
        "attend": model.attend(row),
    }
    return placed(own.tokens_S, device), keywords


def hidden_loss(
    model: TrainModel,
    hidden_SD: Tensor,
    row: MicroBatch,
    num_counted_global: int | Tensor,
    device: torch.device,
    loss: LossFunction | None = None,
) -> Tensor:
    """The same from what the decoder, or its last stage, returned for the row."""
    own = model.own_tokens(row)
    counted_N, targets_N = (placed(each, device) for each in (own.counted_N, own.targets_N))
    if loss is None:
        return model.loss(hidden_SD, counted_N, targets_N, num_counted_global)
    return user_loss(
        loss,
        model.whole_rows(hidden_SD),
        model.logits,
        counted_N,
        targets_N,
        num_counted_global=num_counted_global,
        vocab_size=model.decoder.config.vocab_size,
    )
