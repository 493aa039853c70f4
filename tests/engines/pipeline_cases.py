"""Training of small decoders cut into stages: every case of `tensor_cases`, with an order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.data.batches import StepBatch
from phalanx.engines.optim import ShardedAdamW
from phalanx.engines.pipeline_step import PipelineStep
from phalanx.engines.row_loss import DropoutKeys
from phalanx.engines.trainer_model import TrainModel, build_model
from phalanx.models.source import ModelSource
from phalanx.worlds.logged_group import init_logged
from tests.engines.tensor_cases import (
    CLIP,
    DECAY,
    Case,
    Outcome,
    cpu_process,
    dropout_key,
    job_and_role,
    num_counted,
    rows_of,
)
from tests.ranks import current_store


@dataclass(frozen=True, kw_only=True)
class StagedCase(Case):
    """A case on a mesh with a pipeline axis.

    Attributes:
        order: of passes, as a table of the family pipeline.
        stages: [[start, stop], ...]; empty: split by weight.
    """

    mesh: Mapping[str, int] = field(default_factory=lambda: {"pp": 2})
    specs: Sequence[Mapping[str, Any]] = ()
    order: Mapping[str, Any] = field(default_factory=lambda: {"name": "1f1b"})
    stages: Sequence[Sequence[int]] = ()


def build_staged(rank: int, world_size: int, case: StagedCase) -> TrainModel:
    job, role = job_and_role(case)
    batch = {"stages": [list(stage) for stage in case.stages]} if case.stages else {}
    role = replace(role, order={"family": "pipeline", **case.order}, batch=batch)
    source = ModelSource(config=case.config, folder=None, tokenizer_folder=Path())
    return build_model(job, role, source, cpu_process(rank, world_size, case))


def optimizer_of(model: TrainModel) -> ShardedAdamW:
    return ShardedAdamW(
        model.data.named_held(model.decoder.named_parameters()),
        weight_decay=DECAY,
        clip_norm=CLIP,
        group=model.stages.group,
        counted_elsewhere=model.stages.tied,
    )


def step_of(case: StagedCase, model: TrainModel, step: int) -> StepBatch:
    """The rows of this data rank."""
    rows = rows_of(case, step)
    mine = [
        row.extended(model.row_multiple) for row in rows[model.data.rank :: model.data.num_ranks]
    ]
    num_tokens = sum(len(row.tokens_S) for row in rows)
    return StepBatch(tuple(mine), num_counted(case, step), num_tokens, 0)


def keys_of(case: StagedCase, step: int) -> DropoutKeys | None:
    key = dropout_key(case, step)
    return None if key is None else DropoutKeys(*key)


def train_staged(rank: int, world_size: int, cases: Sequence[StagedCase]) -> list[Outcome]:
    """Every case, one after another; weights are those that this rank counts."""
    init_logged("gloo", dist.PrefixStore("logged", current_store()), rank, world_size)
    return [_train(rank, world_size, case) for case in cases]


def _train(rank: int, world_size: int, case: StagedCase) -> Outcome:
    model = build_staged(rank, world_size, case)
    pipeline, optimizer = PipelineStep(model, torch.device("cpu")), optimizer_of(model)
    losses, norms = [], []
    for step in range(case.steps):
        total = pipeline.run(step_of(case, model, step), keys_of(case, step))
        model.finish_step()
        norm = optimizer.norm()
        optimizer.step(case.lr, norm=norm)
        model.data.finish_update()
        total = total * float(model.counts_loss)
        dist.all_reduce(total)
        losses.append(float(total))
        norms.append(float(norm))
    return Outcome(losses, norms, _whole_trained(model))


def _whole_trained(model: TrainModel) -> dict[str, Tensor]:
    """What was trained, whole, with the tied embedding of both ranks under names of their own."""
    tied = model.stages.tied
    return {
        f"{name} (tied)" if name in tied else name: parameter.detach().full_tensor()
        if hasattr(parameter, "full_tensor")
        else parameter.detach()
        for name, parameter in model.decoder.named_parameters()
        if parameter.requires_grad
    }


def joined(outcomes: Sequence[Outcome]) -> dict[str, Tensor]:
    """The weights of all ranks; those that several hold must be equal to the bit."""
    found: dict[str, Tensor] = {}
    for outcome in outcomes:
        for name, weight in outcome.weights.items():
            assert name not in found or torch.equal(found[name], weight), name
            found[name] = weight
    for name in [name for name in found if name.endswith(" (tied)")]:
        assert torch.equal(found.pop(name), found[name.removesuffix(" (tied)")]), name
    return found
