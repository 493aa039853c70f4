"""The transformers model cut by hand into two stages for torch's 1F1B schedule.

What a plain torch script does: half of the layers on each process, embedding on the first, norm and
head on the last, loss at counted positions. `Schedule1F1B` wants micro-batches of one shape and as
many of them in every step, so rows are filled up to the longest, and steps with rows of nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from peers.case import Case, Row
from peers.transformers_peft import adapted_model, optimizer_of

NAME = "torch script, Schedule1F1B on 2 processes"
NUM_PROCESSES = 2
IGNORED = -100


class _Stage(nn.Module):
    """Half of the layers of a causal model."""

    def __init__(self, causal: nn.Module, rank: int, size: int) -> None:
        super().__init__()
        inner = causal.model
        count = len(inner.layers)
        self.first = rank * count // size
        self.layers = inner.layers[self.first : (rank + 1) * count // size]
        self.config, self.rotary = inner.config, inner.rotary_emb
        self.embed = inner.embed_tokens if rank == 0 else None
        self.norm = inner.norm if rank == size - 1 else None

    def forward(self, rows: Tensor, position_ids: Tensor) -> Tensor:
        hidden_1SD = rows if self.embed is None else self.embed(rows)
        known = {"config": self.config, "inputs_embeds": hidden_1SD, "attention_mask": None}
        known |= {"position_ids": position_ids, "cache": None}
        masks = {
            "full_attention": create_causal_mask(**known),
            "sliding_attention": create_sliding_window_causal_mask(**known),
        }
        kinds = self.config.layer_types[self.first :]
        turns = {kind: self.rotary(hidden_1SD, position_ids, kind) for kind in set(kinds)}
        for kind, layer in zip(kinds, self.layers):
            hidden_1SD = layer(
                hidden_1SD,
                attention_mask=masks[kind],
                position_embeddings=turns[kind],
                position_ids=position_ids,
            )
        return hidden_1SD if self.norm is None else self.norm(hidden_1SD)


def build(case: Case) -> Callable[[int], None]:
    """A step: all rows through both stages, clipping over both, update."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    causal = adapted_model(case).get_base_model()
    module = _Stage(causal, rank, size)
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    optimizer = optimizer_of(module)
    length = max(len(row.tokens_S) for rows in case.steps for row in rows)
    num_items = max(map(len, case.steps))

    def loss_of(hidden_1SD: Tensor, labels_1S: Tensor) -> Tensor:
        counted_S = labels_1S[0] != IGNORED
        logits_NV = causal.lm_head(hidden_1SD[0][counted_S])
        return torch.nn.functional.cross_entropy(
            logits_NV.float(), labels_1S[0][counted_S], reduction="sum"
        )

    schedule = Schedule1F1B(stage, num_items, loss_fn=loss_of, scale_grads=False)

    def step(number: int) -> None:
        tokens_RS, positions_RS, labels_RS = _filled(case.rows(number), num_items, length)
        given = (tokens_RS,) if rank == 0 else ()
        target = {"target": labels_RS} if rank == size - 1 else {}
        schedule.step(*given, position_ids=positions_RS, return_outputs=False, **target)
        _clip(module, 1.0 / case.num_counted(number))
        optimizer.step()
        optimizer.zero_grad()

    return step


def _filled(rows: tuple[Row, ...], num_items: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and labels of equal rows; what is filled up counts nowhere."""
    tokens_RS = np.zeros((num_items, length), dtype=np.int64)
    positions_RS = np.tile(np.arange(length), (num_items, 1))
    labels_RS = np.full((num_items, length), IGNORED, dtype=np.int64)
    for at, row in enumerate(rows):
        size = len(row.tokens_S)
        tokens_RS[at, :size], positions_RS[at, :size] = row.tokens_S, row.positions_S
        positions_RS[at, size:] = np.arange(length - size)
        labels_RS[at, :size] = row.labels_S
    return tuple(map(torch.from_numpy, (tokens_RS, positions_RS, labels_RS)))  # type: ignore


def _clip(module: nn.Module, scale: float) -> None:
    """Divide by the targets of the step, and clip to norm 1 over all stages."""
    grads = [each.grad for each in module.parameters() if each.grad is not None]
    torch._foreach_mul_(grads, scale)
    square = torch.nn.utils.get_total_norm(grads).square()
    dist.all_reduce(square)
    torch._foreach_mul_(grads, torch.clamp(1.0 / (square.sqrt() + 1e-6), max=1.0))
