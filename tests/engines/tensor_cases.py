"""Training of small decoders on any mesh, and the same in one process without any of our binders.

Legend: S tokens of a row, D model, N counted rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.data.batches import MicroBatch
from phalanx.engines.optim import ShardedAdamW
from phalanx.engines.process import Process
from phalanx.engines.row_loss import DropoutKeys, row_loss
from phalanx.engines.trainer_model import TrainModel, build_model
from phalanx.job import Job, load_job
from phalanx.mesh import Mesh
from phalanx.models.decoder import Decoder
from phalanx.models.lora import inject, lora_values
from phalanx.models.parameters import initial_values, load_parameters
from phalanx.models.source import ModelSource
from phalanx.models.spec import DecoderConfig, LoraSpec, canonical_tensors
from phalanx.ops.dropout import DropoutKey
from phalanx.ops.loss import counted_cross_entropy
from phalanx.plan import RoleProgram
from phalanx.worlds.logged_group import device_mesh, init_logged
from tests.ranks import current_store

SEED, STEPS, DECAY, CLIP = 3, 10, 0.1, 0.5
FSDP = {"family": "data", "name": "fsdp"}
REPLICATE = {"family": "data", "name": "replicate"}
MEGATRON = {"family": "tensor", "name": "megatron"}
SEQUENCE = MEGATRON | {"sequence_parallel": True, "gather_twice": False}
Rows = tuple[tuple[int, ...], ...]
ROWS: Rows = ((5, 6), (7,), (3, 1, 5), (13,))


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and on which mesh.

    Attributes:
        lora: adapters; None: all weights.
        lr: large enough to move weights visibly in ten steps.
        rows: documents of each row of a step, dealt to the data ranks in turn.
        by_document: each document is a micro-batch of its own.
    """

    config: DecoderConfig
    mesh: Mapping[str, int] = field(default_factory=lambda: {"shard": 1, "tp": 2})
    specs: Sequence[Mapping[str, Any]] = (FSDP, MEGATRON)
    lora: LoraSpec | None = None
    lr: float = 1e-2
    dtypes: Mapping[str, str] = field(default_factory=dict)
    steps: int = STEPS
    rows: Rows = ROWS
    recompute: str = "none"
    by_document: bool = False

    @property
    def method(self) -> str:
        return "pretrain" if self.lora is None else "lora"

    @property
    def all_dtypes(self) -> dict[str, str]:
        whole = self.config.dtype
        return {"master": whole, "compute": whole, "reduce": whole} | dict(self.dtypes)


class Outcome(NamedTuple):
    """Of training.

    Attributes:
        losses, norms: step by step.
        weights: what was trained, whole.
        changed: frozen parameters that are other than before.
        misplaced: moments that are placed otherwise than their parameter.
    """

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    changed: tuple[str, ...] = ()
    misplaced: tuple[str, ...] = ()


def rows_of(case: Case, step: int) -> list[MicroBatch]:
    """All rows of a step, on whatever rank."""
    draw = np.random.default_rng(step)
    rows, place = [], 0
    for lengths in case.rows:
        for documents in [(n,) for n in lengths] if case.by_document else [lengths]:
            rows.append(_row(draw, documents, place, case.config.vocab_size))
            place += sum(documents)
    return rows


def _row(draw, lengths: tuple[int, ...], place: int, vocab_size: int) -> MicroBatch:
    tokens_S = np.concatenate([draw.integers(0, vocab_size, length) for length in lengths])
    starts = tuple(np.cumsum((0, *lengths[:-1])).tolist())
    counted = [s + at for s, n in zip(starts, lengths) for at in range(n - 1) if at % 3 != 1]
    counted_N = np.array(counted, dtype=np.int64)
    return MicroBatch(
        tokens_S=tokens_S,
        document_starts=starts,
        counted_N=counted_N,
        targets_N=tokens_S[counted_N + 1],
        samples=(),
        offsets=tuple(place + start for start in starts),
    )


def num_counted(case: Case, step: int) -> int:
    return sum(len(row.counted_N) for row in rows_of(case, step))


def dropout_key(case: Case, step: int) -> tuple[int, int] | None:
    return (SEED, step) if case.lora and case.lora.dropout else None


# ---- bound ---------------------------------------------------------------------------------------


def train_cases(rank: int, world_size: int, cases: Sequence[Case]) -> list[Outcome]:
    """Every case that needs so many ranks, one after another."""
    init_logged("gloo", dist.PrefixStore("logged", current_store()), rank, world_size)
    return [train_bound(rank, world_size, case) for case in cases]


def cpu_process(rank: int, world_size: int, case: Case) -> Process:
    mesh = device_mesh("cpu", Mesh(dict(case.mesh)))
    return Process(rank, world_size, torch.device("cpu"), mesh)


def job_and_role(case: Case) -> tuple[Job, RoleProgram]:
    flags = {"model.name": "tiny", "data.source": "none", "train.method": case.method}
    flags |= {"train.seed": SEED, "model.dtype": case.config.dtype}
    if case.lora:
        flags |= {f"train.lora_{k}": getattr(case.lora, k) for k in ("rank", "alpha", "dropout")}
    role = RoleProgram(
        pool="all",
        mesh=case.mesh,
        specs=case.specs,
        dtypes=case.all_dtypes,
        recompute=case.recompute,
    )
    return load_job(None, flags), role


def build(case: Case, process: Process) -> TrainModel:
    source = ModelSource(config=case.config, folder=None, tokenizer_folder=Path())
    return build_model(*job_and_role(case), source, process)


def train_bound(rank: int, world_size: int, case: Case) -> Outcome:
    model = build(case, cpu_process(rank, world_size, case))
    held = model.data.named_held(model.decoder.named_parameters())
    optimizer = ShardedAdamW(held, weight_decay=DECAY, clip_norm=CLIP)
    before = _frozen(model)
    losses, norms = [], []
    for step in range(case.steps):
        mine = rows_of(case, step)[model.data.rank :: model.data.num_ranks]
        total = torch.zeros((), dtype=torch.float64)
        for item, row in enumerate(mine):
            model.data.begin_item(item, len(mine))
            loss = bound_loss(model, case, row, step)
            loss.backward()
            total += loss.detach()
        model.finish_step()
        norms.append(float(optimizer.step(case.lr)))
        model.data.finish_update()
        losses.append(float(model.data.sum(total)))
    after = _frozen(model)
    changed = tuple(name for name, value in before.items() if not torch.equal(after[name], value))
    return Outcome(losses, norms, dict(model.whole_trainable()), changed, _misplaced(optimizer))


def _frozen(model: TrainModel) -> dict[str, Tensor]:
    """Copies of the frozen parameters, whole: some stay gathered once they have been."""
    frozen = {n: p.detach() for n, p in model.decoder.named_parameters() if not p.requires_grad}
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for name, value in frozen.items()
    }


def _misplaced(optimizer: ShardedAdamW) -> tuple[str, ...]:
    state = optimizer.state_dict()
    return tuple(
        name
        for name, parameter in optimizer.named_parameters.items()
        for kind in ("exp_avg", "exp_avg_sq")
        if _place(state[kind][name]) != _place(parameter)
    )


def _place(tensor: Tensor) -> tuple:
    """Shape, mesh and placements."""
    return tensor.shape, *(getattr(tensor, name, ()) for name in ("device_mesh", "placements"))


def bound_loss(
    model: TrainModel, case: Case, row: MicroBatch, step: int, device: str = "cpu"
) -> Tensor:
    key = dropout_key(case, step)
    return row_loss(
        model,
        row.extended(model.row_multiple),
        num_counted(case, step),
        torch.device(device),
        None if key is None else DropoutKeys(*key),
    )


# ---- plain ---------------------------------------------------------------------------------------


def train_plain(case: Case) -> Outcome:
    """One process: a decoder, torch's optimizer and torch's clipping."""
    decoder = Decoder(replace(case.config, dtype=case.all_dtypes["master"]))
    if case.lora:
        decoder = Decoder(case.config)
        inject(decoder, case.lora, dtype=case.all_dtypes["master"])
        adapters = lora_values(case.config, case.lora, SEED, case.all_dtypes["master"])
        load_parameters(decoder, adapters, strict=False)
    values = initial_values(SEED, canonical_tensors(case.config).values())
    load_parameters(decoder, values, strict=False)
    decoder.train()
    trained = {n: p for n, p in decoder.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in trained.values() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in trained.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=case.lr, betas=(0.9, 0.95))
    losses, norms = [], []
    for step in range(case.steps):
        total = 0.0
        for row in rows_of(case, step):
            loss = plain_loss(decoder, case, row, step)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained.values()])
        for parameter in trained.values():
            parameter.grad *= min(1.0, CLIP / (float(norm) + 1e-6))
        adamw.step()
        adamw.zero_grad()
        losses.append(total)
        norms.append(float(norm))
    return Outcome(losses, norms, {name: p.detach() for name, p in trained.items()})


def plain_loss(decoder: Decoder, case: Case, row: MicroBatch, step: int) -> Tensor:
    arrays = (row.tokens_S, row.positions_S, row.global_tokens_S, row.counted_N, row.targets_N)
    tokens_S, positions_S, places_S, counted_N, targets_N = map(torch.from_numpy, arrays)
    key = dropout_key(case, step)
    dropout = None if key is None else DropoutKey(*key, places_S)
    hidden_SD = decoder(tokens_S, positions_S, row.document_starts, dropout=dropout)
    return counted_cross_entropy(
        hidden_SD,
        decoder.head_weight,
        counted_N,
        targets_N,
        num_counted_global=num_counted(case, step),
        soft_cap=case.config.logit_soft_cap,
    )
