"""A training job as numbers, whatever it runs on: model, rows, batch, what is left open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from phalanx.cost.model_shape import ModelShape, shape_of
from phalanx.cost.training_plans import RECOMPUTE
from phalanx.data.batches import SampleStream, num_steps
from phalanx.hardware import Machine
from phalanx.models.config import DecoderConfig
from phalanx.models.spec import PROJECTIONS, LoraSpec
from phalanx.planner.profile import DataProfile
from phalanx.planner.rows import DealtRows, FixedRows, Rows

_AXES = ("replicate", "shard", "pp", "cp", "tp")


@dataclass(frozen=True)
class Choice:
    """Values that a job leaves open, or has fixed.

    Attributes:
        recompute, row_tokens: values to try; 0 tokens: as many as the rows ask for.
        mesh: axis sizes that the job names for this many devices; None: open.
    """

    recompute: Sequence[str] = RECOMPUTE
    row_tokens: int = 0
    mesh: Mapping[str, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, wherever it runs.

    Attributes:
        config: sizes of a decoder that Phalanx computes; its dtype is that of compute and of frozen
            weights. None: another one, known by `known_shape` alone.
        known_shape: of a model without `config`.
        profile: of a data file; None: rows of `seq_tokens`.
        method: "lora", "full" or "pretrain"; lora: the adapters, None otherwise.
        batch_tokens: of one optimizer step.
        epochs: passes over the samples, or 0 and `steps`.
        master_dtype: of what is trained.
        checkpoints: kept at most at once.
        precision: of matrix products: "bf16", "fp8", "fp4".
        base_bits: of frozen weights (QLoRA: 4).
        expert_imbalance: tokens of the busiest expert rank over the mean.
        software: whose efficiency and memory are assumed; "": by the machine.
    """

    config: DecoderConfig | None = None
    known_shape: ModelShape | None = None
    profile: DataProfile | None = None
    seq_tokens: int = 0
    method: str = "lora"
    lora: LoraSpec | None = None
    batch_tokens: int = 4096
    epochs: float = 1.0
    steps: int = 0
    master_dtype: str = "float32"
    checkpoints: int = 1
    seed: int = 0
    choice: Choice = field(default_factory=Choice)
    precision: str = "bf16"
    base_bits: int = 16
    expert_imbalance: float = 1.0
    software: str = ""

    @cached_property
    def shape(self) -> ModelShape:
        """Sizes for prices."""
        if self.known_shape is not None:
            return self.known_shape
        assert self.config is not None
        return shape_of(self.config)

    @cached_property
    def rows(self) -> Rows:
        """Of a batch."""
        fixed = self.choice.row_tokens
        if self.profile is None:
            return FixedRows(self.seq_tokens, self.batch_tokens // self.seq_tokens, fixed)
        return DealtRows(
            self.profile.samples, self.shape, self.batch_tokens, self.num_steps, self.seed, fixed
        )

    @cached_property
    def num_steps(self) -> int:
        """Optimizer steps of the whole job."""
        if self.epochs and self.profile is not None:
            stream = SampleStream(self.profile.samples, self.seed)
            return num_steps(stream, self.epochs, self.batch_tokens)
        return self.steps

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Names or patterns of the matrices with an adapter, where the job names some; (): all."""
        targets = self.lora.targets if self.lora is not None else PROJECTIONS
        return () if set(targets) == set(PROJECTIONS) else targets

    @property
    def casts(self) -> bool:
        """Whether what is trained is kept in another dtype than computes."""
        computes = self.config.dtype if self.config is not None else "bfloat16"
        return self.method != "lora" and self.master_dtype != computes

    def least_device_s(self, machine: Machine) -> float:
        """Seconds of one device for the whole job that no plan can beat: the FLOPs of products with
        the weights at the machine's rate."""
        passes = 2.0 if self.method == "lora" else 3.0
        flops = passes * self.shape.product_flops_per_token * self.batch_tokens * self.num_steps
        return flops / machine.matmul_flops_per_s(self.precision)

    def software_on(self, machine: Machine) -> str:
        """Key of the efficiency and memory tables: this trainer's where it tunes the model, that of
        other PyTorch programs for pretraining, which is at home at sizes it does not reach yet."""
        if self.software or machine.cores_per_device:
            return self.software or "maxtext"
        return "phalanx" if self.config is not None and self.method != "pretrain" else "torch"

    def with_mesh(self, mesh: Mapping[str, int]) -> Training:
        """Keeping to the axis sizes that a job names."""
        return replace(self, choice=replace(self.choice, mesh=mesh))


def fixed_mesh(mesh: Mapping[str, int], num_devices: int) -> Mapping[str, int] | None:
    """The job's mesh, if it is one of the axes of a training run and fits the cluster."""
    is_searched = set(mesh) <= set(_AXES)
    return mesh if mesh and is_searched and prod(mesh.values()) == num_devices else None
