"""The model of a training process: built on the meta device, bound, then filled slice by slice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.engines.bind import BoundData, bind_data
from phalanx.engines.bind_tensor import BoundTensor, bind_tensor
from phalanx.engines.process import Process
from phalanx.engines.tensor_products import held
from phalanx.errors import PlanError
from phalanx.job import Job
from phalanx.layout.tensor_split import kv_heads_of, tensor_legality
from phalanx.models.cache import KvCache
from phalanx.models.decoder import Decoder
from phalanx.models.hf import read_tensors
from phalanx.models.lora import inject, lora_values
from phalanx.models.parameters import initial_values, load_parameters
from phalanx.models.source import ModelSource
from phalanx.models.spec import AttentionKind, DecoderConfig, LoraSpec, canonical_tensors
from phalanx.ops.loss import counted_cross_entropy
from phalanx.ops.tensor_exchange import join_tokens
from phalanx.plan import RoleProgram
from phalanx.policy import Spec


@dataclass(frozen=True)
class TrainModel:
    """A decoder that is bound to the role's mesh.

    Attributes:
        decoder: with adapters where the method is lora.
        data: how its gradients are summed over data axes.
        tensor: how its products are split.
        lora: of the adapters; None: all parameters are trained.
    """

    decoder: Decoder
    data: BoundData
    tensor: BoundTensor
    lora: LoraSpec | None

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss counts: one rank per data rank, first on the model axis."""
        return self.tensor.rank == 0

    @property
    def row_multiple(self) -> int:
        """Rows must be a multiple of so many tokens."""
        return self.tensor.degree if self.tensor.splits_tokens else 1

    def loss(
        self,
        hidden_SD: Tensor,
        counted_N: Tensor,
        targets_N: Tensor,
        num_counted_global: int | Tensor,
    ) -> Tensor:
        """Sum of -log p(target) over the counted rows, over the global number of them.

        Equal on all ranks of the model axis. Arguments as in `ops.loss.counted_cross_entropy`;
        `hidden_SD` is what the decoder returned on this rank.
        """
        return counted_cross_entropy(
            self.whole_rows(hidden_SD),
            held(self.decoder.head_weight),
            counted_N,
            targets_N,
            num_counted_global=num_counted_global,
            soft_cap=self.decoder.config.logit_soft_cap,
            part=self.tensor.vocabulary,
        )

    def whole_rows(self, hidden_SD: Tensor) -> Tensor:
        """Hidden states of all tokens of the row, where the decoder returned this rank's.

        What follows must be computed equally by all ranks of the model axis (`loss`, `logits`).
        """
        if not self.tensor.splits_tokens:
            return hidden_SD
        return join_tokens(hidden_SD, self.tensor.group)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, V] over the whole vocabulary, soft cap applied, with gradient.

        Args:
            hidden_ND: rows of `whole_rows`.
        """
        if self.tensor.vocabulary is None:
            return self.decoder.logits(hidden_ND)
        logits_NV = self.tensor.vocabulary.logits(hidden_ND, held(self.decoder.head_weight))
        cap = self.decoder.config.logit_soft_cap
        return logits_NV if cap is None else cap * torch.tanh(logits_NV / cap)

    def cache(self, capacity: int) -> KvCache:
        """An empty cache for the key and value heads that this rank computes."""
        config, weight = self.decoder.config, self.decoder.head_weight
        degree, rank = self.tensor.degree, self.tensor.rank
        local = replace(config, kinds=tuple(_local_kind(k, degree, rank) for k in config.kinds))
        return KvCache(local, capacity=capacity, device=weight.device)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """For many small forward passes without gradient: units stay gathered, tokens whole."""
        with self.data.gathered(), self.tensor.whole_tokens():
            yield

    def finish_step(self) -> None:
        """Wait until all gradients are summed, over data axes and then over the model axis."""
        self.data.finish_step()
        self.tensor.finish_step()

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
    specs = role.built_specs()
    tensor = _bind_tensor(decoder, [spec for spec in specs if spec.family == "tensor"], process)
    data = bind_data(
        decoder,
        [spec for spec in specs if spec.family == "data"],
        process.mesh,
        param_dtype=dtypes["compute"],
        reduce_dtype=dtypes["reduce"],
    )
    decoder.to_empty(device=process.device)
    load_parameters(decoder, _values(job, source, decoder, lora, dtypes["master"]))
    decoder.train()
    return TrainModel(decoder, data, tensor, lora)


def _bind_tensor(decoder: Decoder, specs: Sequence[Spec], process: Process) -> BoundTensor:
    config, head_rows = decoder.config, {}
    for spec in specs:
        if spec.axis not in process.mesh.mesh_dim_names:
            continue  # the binder says so
        degree = process.mesh[spec.axis].size()
        tensor_legality(config, degree).require(f"plan.mesh.{spec.axis}")
        head_rows |= _head_rows(config, degree, process.mesh.get_local_rank(spec.axis))
    bound = bind_tensor(decoder, specs, process.mesh, head_rows=head_rows)
    if bound.splits_tokens and bound.vocabulary is None:
        rule, legal = "split tokens need a split vocabulary here", ["vocabulary_parallel = true"]
        raise PlanError("plan/illegal", "plan.tensor", "sequence_parallel", rule, legal=legal)
    return bound


def _head_rows(config: DecoderConfig, degree: int, rank: int) -> dict[str, list[int]]:
    """Rows of the key and value projections that a rank computes, where they are not cut."""
    rows = {}
    for at in range(config.num_layers):
        kind = config.attention(at)
        if kind.num_kv_heads % degree:
            heads = kv_heads_of(kind.num_heads, kind.num_kv_heads, degree, rank)
            channels = range(kind.head_dim)
            of_heads = [head * kind.head_dim + channel for head in heads for channel in channels]
            for name in ("k_proj", "v_proj"):
                rows[f"model.layers.{at}.self_attn.{name}"] = of_heads
    return rows


def _local_kind(kind: AttentionKind, degree: int, rank: int) -> AttentionKind:
    """What a rank computes of an attention kind."""
    heads = kv_heads_of(kind.num_heads, kind.num_kv_heads, degree, rank)
    return replace(kind, num_heads=kind.num_heads // degree, num_kv_heads=len(heads))


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
