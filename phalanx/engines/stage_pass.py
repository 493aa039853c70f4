"""Forward passes through the stages of a pipeline: held-out rows, and answers token by token.

Rows go through the stages as a wave: in tick t stage s computes row t - s, then all ranks hand on
what they have made, in one batch of transfers. Every rank computes all of its stages in a tick, so
nobody waits once the wave has filled the pipeline, however stages are placed; and as the transfers
of a tick are one batch, in the order of the stages on both sides, no placement can end in a
deadlock, on gloo or on NCCL.

Legend: S tokens of a row, D model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from phalanx.engines.stages import BoundStages
    from phalanx.engines.trainer_model import TrainModel

Inputs = tuple[Tensor, Mapping[str, Any]]


@torch.no_grad()
def stage_pass(
    model: TrainModel,
    num_rows: int,
    inputs: Callable[[int, int], Inputs],
    finish: Callable[[int, Tensor], None],
) -> None:
    """Run rows through all stages; all ranks of the pipeline call it.

    Args:
        model: cut into stages.
        num_rows: the same on all of them.
        inputs: row and stage -> tokens [S] that this rank computes, and keywords of the decoder.
        finish: gets row and hidden states [S, D] behind the last norm, on the rank that ends.
    """
    stages = model.stages
    entering: dict[int, Tensor] = {}
    for tick in range(num_rows + stages.num_stages - 1):
        leaving: dict[int, Tensor] = {}
        for stage, part in sorted(stages.parts.items()):
            if not 0 <= (row := tick - stage) < num_rows:
                continue
            tokens_S, keywords = inputs(row, stage)
            rows = tokens_S if part.embeds else entering[stage]
            hidden_SD = model.decoder(rows, part=part, **keywords)
            if part.ends:
                finish(row, hidden_SD)
            else:
                leaving[stage] = hidden_SD
        room = {
            stage: _room(model, inputs(row, stage)[0])
            for stage in _fed_by_others(stages)
            if 0 <= (row := tick + 1 - stage) < num_rows
        }
        entering = _handed_on(stages, leaving, room)


def _fed_by_others(stages: BoundStages) -> list[int]:
    """Stages of this rank whose input another rank makes."""
    at = stages.rank_of_stage
    return [stage for stage in sorted(stages.parts) if stage and at[stage - 1] != at[stage]]


def _room(model: TrainModel, tokens_S: Tensor) -> Tensor:
    """For the hidden states that this rank has of a row between two stages."""
    num_tokens = len(tokens_S)
    if model.tensor.splits_tokens:
        num_tokens //= model.tensor.degree
    shape = (num_tokens, model.decoder.config.hidden_size)
    return torch.empty(shape, dtype=getattr(torch, model.compute_dtype), device=tokens_S.device)


def _handed_on(
    stages: BoundStages, leaving: Mapping[int, Tensor], room: Mapping[int, Tensor]
) -> dict[int, Tensor]:
    """What enters each stage of this rank next.

    Args:
        leaving: stage -> what it has made.
        room: stage -> where to put what the stage before it has made.
    """
    entering, ops = dict(room), []
    at, group = stages.rank_of_stage, stages.group
    for before in sorted({*leaving, *(stage - 1 for stage in room)}):
        stage = before + 1
        if at[before] == at[stage]:
            entering[stage] = leaving[before]
        elif before in leaving:
            sent_SD = leaving[before].contiguous()
            ops.append(dist.P2POp(dist.isend, sent_SD, group=group, group_peer=at[stage]))
        else:
            ops.append(dist.P2POp(dist.irecv, room[stage], group=group, group_peer=at[before]))
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()
    return entering


@torch.no_grad()
def next_tokens(
    model: TrainModel, rows: Sequence[Tensor], caches: Sequence[Mapping[int, Any]]
) -> list[int]:
    """The most likely token behind each sequence, on every rank of the pipeline.

    Args:
        rows: tokens [S] of each that its caches do not hold yet.
        caches: of each, stage -> the cache of its layers.
    """
    stages, device = model.stages, rows[0].device
    found = torch.zeros(len(rows), dtype=torch.int64, device=device)

    def inputs(row: int, stage: int) -> Inputs:
        return rows[row], {"caches": [caches[row][stage]]}

    def finish(row: int, hidden_SD: Tensor) -> None:
        found[row] = model.logits(hidden_SD[-1:]).argmax()

    stage_pass(model, len(rows), inputs, finish)
    dist.broadcast(found, group=stages.group, group_src=stages.rank_of_stage[-1])
    return found.tolist()
