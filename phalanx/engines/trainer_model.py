"""The model of a training process: built on the meta device, bound, then filled slice by slice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.engines.bind import BoundData, bind_data
from phalanx.engines.process import Process
from phalanx.job import Job
from phalanx.models.cache import KvCache
from phalanx.models.decoder import Decoder
from phalanx.models.hf import read_tensors
from phalanx.models.lora import inject, lora_values
from phalanx.models.parameters import initial_values, load_parameters
from phalanx.models.source import ModelSource
from phalanx.models.spec import LoraSpec, canonical_tensors
from phalanx.ops.loss import counted_cross_entropy
from phalanx.plan import RoleProgram


@dataclass(frozen=True)
class TrainModel:
    """A decoder that is bound to the role's mesh.

    Attributes:
        decoder: with adapters where the method is lora.
        data: how its gradients are summed.
        lora: of the adapters; None: all parameters are trained.
    """

    decoder: Decoder
    data: BoundData
    lora: LoraSpec | None

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss counts: one rank per data rank, first on every model axis."""
        return True

    @property
    def row_multiple(self) -> int:
        """Rows must be a multiple of so many tokens."""
        return 1

    def loss(
        self,
        hidden_SD: Tensor,
        counted_N: Tensor,
        targets_N: Tensor,
        num_counted_global: int | Tensor,
    ) -> Tensor:
        """Sum of -log p(target) over the counted rows, over the global number of them.

        Equal on all ranks of model axes. Arguments as in `ops.loss.counted_cross_entropy`;
        `hidden_SD` is what the decoder returned on this rank.
        """
        return counted_cross_entropy(
            hidden_SD,
            self.decoder.head_weight,
            counted_N,
            targets_N,
            num_counted_global=num_counted_global,
            soft_cap=self.decoder.config.logit_soft_cap,
        )

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, V] over the whole vocabulary, soft cap applied, with gradient."""
        return self.decoder.logits(hidden_ND)

    def cache(self, capacity: int) -> KvCache:
        """An empty cache for the key-value heads that this rank computes."""
        return KvCache(
            self.decoder.config, capacity=capacity, device=self.decoder.head_weight.device
        )

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """For many small forward passes without gradient: units stay gathered, tokens whole."""
        with self.data.gathered():
            yield

    def finish_step(self) -> None:
        """Wait until all gradients are summed, over data axes and then over model axes."""
        self.data.finish_step()

    def whole_trainable(self) -> Iterator[tuple[str, Tensor]]:
        """(canonical name, whole tensor on the CPU) of what was trained; all ranks call it."""
        for name, parameter in self.decoder.named_parameters():
            if parameter.requires_grad:
                yield name, _whole(parameter)


def _whole(parameter: nn.Parameter) -> Tensor:
    value = parameter.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu()


def lora_of(job: Job) -> LoraSpec | None:
    """The adapters of a job; None unless its method is lora."""
    if job.train.method != "lora":
        return None
    train = job.train
    return LoraSpec(rank=train.lora_rank, alpha=train.lora_alpha, dropout=train.lora_dropout)


def build_model(job: Job, role: RoleProgram, source: ModelSource, process: Process) -> TrainModel:
    """Shapes on the meta device, adapters, sharding, then weights: a rank holds its part only.

    Frozen weights are stored in the job's dtype; what is trained in the plan's "master" dtype
    (float32 unless it says otherwise), computed in "compute" (the job's dtype).
    """
    dtypes = {"master": "float32", "compute": job.model.dtype, "reduce": "float32"} | dict(
        role.dtypes
    )
    lora = lora_of(job)
    stored = source.config.dtype if lora else dtypes["master"]
    decoder = Decoder(source.config.with_dtype(stored), device="meta")
    if lora is not None:
        inject(decoder, lora, dtype=dtypes["master"])
    specs = [spec for spec in role.built_specs() if spec.family == "data"]
    data = bind_data(
        decoder,
        specs,
        process.mesh,
        param_dtype=dtypes["compute"],
        reduce_dtype=dtypes["reduce"],
    )
    decoder.to_empty(device=process.device)
    load_parameters(decoder, _values(job, source, decoder, lora, dtypes["master"]))
    decoder.train()
    return TrainModel(decoder, data, lora)


def _values(
    job: Job, source: ModelSource, decoder: Decoder, lora: LoraSpec | None, master: str
) -> Iterator[tuple[str, Tensor]]:
    config, seed = decoder.config, job.train.seed
    if source.folder is None:
        yield from initial_values(seed, canonical_tensors(config).values())
    else:
        for name, value in read_tensors(source.folder, canonical_tensors(config)):
            yield name, value.to(getattr(torch, config.dtype))
    if lora is not None:
        yield from lora_values(config, lora, seed, master)
