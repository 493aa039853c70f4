"""A plan in terms that programs share: what importers read and emitters write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

ALL_LEFT = -1  # of `shard`: every rank that no other axis takes
METHODS = ("pretrain", "full", "lora")
PRECISIONS = ("fp32", "bf16", "fp16", "fp8", "fp4")

NOT_PRICED, NOT_MODELLED = "not part of the price", "not modelled"
UNKNOWN, ASSUMED = "unknown", "assumed"


class Note(NamedTuple):
    """What a reader of the price has to know of one key.

    Attributes:
        where: "line 12", or "" for what the file does not say.
        key: as it is written.
        kind: "not part of the price" (a key of the program that says nothing about time or memory
            that is priced), "not modelled" (may change them, and the price does not know how),
            "unknown" (no key of that program's version) or "assumed" (the file leaves it open).
        text: one sentence.
    """

    where: str
    key: str
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class ForeignPlan:
    """What a configuration of another program says; None: it does not say.

    A data rank computes `micro_rows` rows of `row_tokens` tokens at a time, `num_micro` times a
    step; or `step_rows` says the rows of a step over all data ranks.

    Attributes:
        kind: the program; version: the one whose meaning of the keys was used.
        path: file that was read, or "".
        role: "train" or "serve".
        model: name, folder or preset; sizes: `config.json` keys, where the file gives sizes.
        data: data set or path, as it stands there.
        method: of `METHODS`; lora_rank, lora_alpha, lora_dropout, lora_targets: of adapters.
        base_bits: of frozen weights (QLoRA: 4).
        devices: that the file itself names.
        tensor, pipeline, context, expert, expert_tensor, replicate: degrees.
        shard: ranks that share weights, gradients or moments; `ALL_LEFT`: the rest of them.
        zero: what is sharded: 0 nothing, 1 moments, 2 and gradients, 3 and weights.
        keeps_gathered: weights stay gathered from the forward to the backward pass.
        virtual: model chunks of a pipeline rank; schedule: of `cost.training_plans.SCHEDULES`.
        context_kind: of `cost.training_plans.CONTEXT_KINDS`.
        packed: rows are filled with several documents; step_documents: about so many a step.
        steps, epochs, lr: of the training.
        precision: of matrix products; master_dtype: of trained weights; moment_bytes: of one
            element of both moments together.
        recompute: of `cost.training_plans.RECOMPUTE`; offload: share of optimizer state in host
            memory; offloads_weights: weights live there too.
        max_tokens, max_running, max_step_tokens: limits of a server; memory_frac: of device memory
            that it takes; kv_bits: of a cached element; caches_prefixes, chunks_prefill: whether.
        weight_bits: of served weights.
        own_keys: of a job of Phalanx that the plan was made for, all that changes its result.
        origin: field -> where its value comes from ("line 12: tp_size", "default of vllm 0.33.0").
        notes: keys that are not among these.
    """

    kind: str
    version: str = ""
    path: str = ""
    role: str = "train"
    model: str | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict)
    data: str | None = None
    method: str | None = None
    lora_rank: int | None = None
    lora_alpha: float | None = None
    lora_dropout: float | None = None
    lora_targets: tuple[str, ...] | None = None
    base_bits: int | None = None
    devices: int | None = None
    tensor: int | None = None
    pipeline: int | None = None
    context: int | None = None
    expert: int | None = None
    expert_tensor: int | None = None
    replicate: int | None = None
    shard: int | None = None
    zero: int | None = None
    keeps_gathered: bool | None = None
    virtual: int | None = None
    schedule: str | None = None
    context_kind: str | None = None
    sequence_parallel: bool | None = None
    micro_rows: int | None = None
    row_tokens: int | None = None
    num_micro: int | None = None
    step_rows: int | None = None
    packed: bool | None = None
    step_documents: int | None = None
    steps: int | None = None
    epochs: float | None = None
    lr: float | None = None
    precision: str | None = None
    master_dtype: str | None = None
    moment_bytes: float | None = None
    recompute: str | None = None
    offload: float | None = None
    offloads_weights: bool | None = None
    max_tokens: int | None = None
    max_running: int | None = None
    max_step_tokens: int | None = None
    memory_frac: float | None = None
    kv_bits: int | None = None
    weight_bits: int | None = None
    caches_prefixes: bool | None = None
    chunks_prefill: bool | None = None
    own_keys: Mapping[str, Any] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()

    def stated(self) -> dict[str, Any]:
        """Fields that have a value, in order, without where they come from."""
        return {
            name: value
            for name in FIELDS
            if (value := getattr(self, name)) is not None and value != {}
        }

    @property
    def software(self) -> str:
        """Key of the efficiency and memory tables: what the program runs on."""
        return software_of(self.kind)


def software_of(program: str) -> str:
    """Key of the efficiency and memory tables of what a program runs on."""
    own = {"megatron": "megatron", "vllm": "vllm", "torchtitan": "torch", "phalanx": "torch"}
    return own.get(program, "transformers")


_ABOUT = {"kind", "version", "path", "own_keys", "origin", "notes", "role"}
FIELDS = tuple(each.name for each in fields(ForeignPlan) if each.name not in _ABOUT)
