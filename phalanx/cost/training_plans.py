"""Many training plans at once: a table of integers that cost models read column by column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

RECOMPUTE = ("none", "selective", "full")
SCHEDULES = (
    *("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipe"),
    *("dualpipe-v", "hanayo"),
)
CONTEXT_KINDS = ("all-gather", "ring", "ulysses")

Column = np.ndarray  # [N], or 0-dimensional where all plans agree


@dataclass(frozen=True, kw_only=True)
class TrainingPlans:
    """N plans of one model on one kind of device. Columns are arrays [N] or numbers.

    A step of a data rank is `num_micro` micro-batches of `micro_rows` rows of `row_tokens` tokens.
    Devices = tensor * context * pipeline * data; experts are spread over ranks of these (expert
    parallelism takes no devices of its own).

    Attributes:
        tensor, pipeline, context, expert, data: degrees.
        shard: data ranks (times context ranks) that share weights, gradients or moments, as `zero`
            says; 1: none do. data * context / shard replicas hold the same.
        zero: what is sharded: 0 nothing, 1 moments, 2 and gradients, 3 and weights (FSDP).
        keeps_gathered: with zero 3, weights stay gathered from the forward to the backward pass.
        virtual: model chunks of a pipeline rank; of hanayo two for each wave.
        schedule: index into `SCHEDULES`.
        context_kind: index into `CONTEXT_KINDS`.
        expert_tensor: tensor degree inside an expert.
        sequence_parallel: tokens between blocks are split over the tensor axis too.
        micro_rows, row_tokens, num_micro: of a data rank, as above.
        document_tokens: sum of squares over sum of document lengths: a token sees half of it, on
            average; equals row_tokens where rows are whole documents.
        counted_frac: tokens whose loss counts; the head is computed at these alone.
        imbalance: work of the heaviest rank over the mean (documents of unequal length), >= 1.
        expert_imbalance: tokens of the busiest expert rank over the mean, >= 1.
        recompute: index into `RECOMPUTE`.
        offload: share of moments and master weights that live in host memory.
    Scalars:
        method: "pretrain", "full" or "lora".
        lora_rank: of adapters; lora_targets: names or patterns of the matrices that have one; ():
            those that `software` adapts, as a rule all.
        base_bits: of frozen weights (QLoRA: 4).
        precision: of matrix products: "bf16", "fp16", "fp8", "fp4".
        software: a key of the efficiency tables, e.g. "megatron", "torch", "nanotron"; what it
            keeps in memory and how well it overlaps.
    """

    tensor: Any = 1
    pipeline: Any = 1
    context: Any = 1
    expert: Any = 1
    data: Any = 1
    shard: Any = 1
    zero: Any = 0
    keeps_gathered: Any = 0
    virtual: Any = 1
    schedule: Any = 1
    context_kind: Any = 0
    expert_tensor: Any = 1
    sequence_parallel: Any = 0
    micro_rows: Any = 1
    row_tokens: Any
    num_micro: Any = 1
    document_tokens: Any = 0
    counted_frac: Any = 1.0
    imbalance: Any = 1.0
    expert_imbalance: Any = 1.0
    recompute: Any = 0
    offload: Any = 0.0
    method: str = "pretrain"
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    base_bits: int = 16
    precision: str = "bf16"
    software: str = "megatron"

    def __post_init__(self) -> None:
        for name in COLUMNS:
            object.__setattr__(self, name, np.asarray(getattr(self, name)))
        if not self.document_tokens.any():
            object.__setattr__(self, "document_tokens", self.row_tokens)

    @property
    def shape(self) -> tuple[int, ...]:
        """(N,) or () when no column is an array."""
        return np.broadcast_shapes(*(getattr(self, name).shape for name in COLUMNS))

    @property
    def devices(self) -> Column:
        """Of each plan."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def micro_tokens(self) -> Column:
        """Tokens of a micro-batch, over all its context ranks."""
        return self.micro_rows * self.row_tokens

    @property
    def rank_tokens(self) -> Column:
        """Tokens of a micro-batch on one context rank."""
        return self.micro_tokens / self.context

    @property
    def step_tokens(self) -> Column:
        """Tokens of a step, over all ranks."""
        return self.micro_tokens * self.num_micro * self.data

    def columns(self) -> Mapping[str, Column]:
        """By name, all of the same length."""
        shape = self.shape or (1,)
        return {name: np.broadcast_to(getattr(self, name), shape) for name in COLUMNS}

    def take(self, where: np.ndarray) -> TrainingPlans:
        """Rows of the table, by mask or indices."""
        return replace(self, **{name: column[where] for name, column in self.columns().items()})

    def row(self, at: int) -> dict[str, float]:
        """One plan."""
        return {name: column[at].item() for name, column in self.columns().items()}


_SCALARS = {"method", "lora_rank", "lora_targets", "base_bits", "precision", "software"}
COLUMNS = tuple(field.name for field in fields(TrainingPlans) if field.name not in _SCALARS)
