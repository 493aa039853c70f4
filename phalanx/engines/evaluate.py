"""Held-out loss and greedy samples, with the model as it stands in training.

Legend: S tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.data.batches import StepBatch
from phalanx.engines.trainer_model import TrainModel
from phalanx.engines.trainer_step import row_loss
from phalanx.models.cache import KvCache


@torch.no_grad()
def held_out_loss(model: TrainModel, batch: StepBatch, device: torch.device) -> Tensor:
    """Mean loss over the targets of all ranks' rows, in nats; all ranks call it."""
    model.decoder.eval()
    total = torch.zeros((), device=device)
    for row in batch.micro_batches:
        total += row_loss(model, row, batch.num_counted_global, device)
    model.decoder.train()
    return model.data.sum(total)


@torch.no_grad()
def greedy(
    model: TrainModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    end_tokens: Sequence[int],
    device: torch.device,
) -> list[list[int]]:
    """The most likely continuation of each prompt, without its end token; all ranks call it.

    Every rank computes all of them: units are gathered once and then stay, so ranks exchange
    nothing token by token.
    """
    model.decoder.eval()
    with model.data.gathered():
        outputs = [
            _continue(model, list(prompt), max_new_tokens, set(end_tokens), device)
            for prompt in prompts
        ]
    model.decoder.train()
    return outputs


def _continue(
    model: TrainModel, prompt: list[int], max_new_tokens: int, ends: set[int], device: torch.device
) -> list[int]:
    cache = KvCache(model.decoder.config, capacity=len(prompt) + max_new_tokens, device=device)
    made: list[int] = []
    rows_S = torch.tensor(prompt, device=device)
    while len(made) < max_new_tokens:
        hidden_SD = model.decoder(rows_S, caches=[cache])
        token = int(model.decoder.logits(hidden_SD[-1:]).argmax())
        if token in ends:
            break
        made.append(token)
        rows_S = torch.tensor([token], device=device)
    return made
