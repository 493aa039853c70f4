"""A training job as numbers, whatever it runs on: model, samples, batch, what plans share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from phalanx.cost.cluster_step import OperatorGroup
from phalanx.cost.step_memory import Unit
from phalanx.cost.step_work import Workload, workload_of
from phalanx.data.batches import SampleStream, num_steps, step_samples
from phalanx.layout.placement import divisors
from phalanx.models.config import DecoderConfig
from phalanx.models.spec import LoraSpec
from phalanx.planner.candidates import Choice, Layout
from phalanx.planner.profile import DataProfile

_DEALT_STEPS = 8  # of the data, to see what a typical step holds
_DEALT_DOCUMENTS = 2048  # of a step


@dataclass(frozen=True)
class Parts:
    """What many candidates share, filled as it is asked for.

    Attributes:
        groups: (tensor degree, tokens split, document tokens) -> operators of a rank.
        saved: the same and recomputation -> bytes that autograd keeps of a token.
        units: tensor degree, sharding -> units of the data specs.
    """

    groups: dict[tuple, tuple[OperatorGroup, ...]] = field(default_factory=dict)
    saved: dict[tuple, float] = field(default_factory=dict)
    units: dict[tuple, list[Unit]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, wherever it runs.

    Attributes:
        config: sizes; its dtype is that of compute and of frozen weights.
        method: "lora", "full" or "pretrain"; lora: the adapters, None otherwise.
        batch_tokens: of one optimizer step.
        epochs: passes over the samples, or 0 and `steps`.
        master_dtype: of what is trained.
        checkpoints: kept at most at once.
    """

    config: DecoderConfig
    profile: DataProfile
    method: str = "lora"
    lora: LoraSpec | None = None
    batch_tokens: int = 4096
    epochs: float = 1.0
    steps: int = 0
    master_dtype: str = "float32"
    checkpoints: int = 1
    seed: int = 0
    choice: Choice = field(default_factory=Choice)

    @cached_property
    def stream(self) -> SampleStream:
        """The samples in training order."""
        return SampleStream(self.profile.samples, self.seed)

    @cached_property
    def num_steps(self) -> int:
        """Optimizer steps of the whole job."""
        if self.epochs:
            return num_steps(self.stream, self.epochs, self.batch_tokens)
        return self.steps

    @cached_property
    def documents_of_a_step(self) -> int:
        """Of the first one."""
        return len(step_samples(self.stream, 0, self.batch_tokens))

    @property
    def casts(self) -> bool:
        """Whether what is trained is kept in another dtype than computes."""
        return self.method != "lora" and self.master_dtype != self.config.dtype

    @cached_property
    def works(self) -> dict[tuple[int, int], Workload]:
        """(data ranks, row tokens) -> what a rank computes; filled as it is asked for."""
        return {}

    @cached_property
    def parts(self) -> Parts:
        """What plans share, on all clusters."""
        return Parts()

    def work(self, layout: Layout, row_tokens: int) -> Workload:
        """What a rank of a layout computes in a typical step."""
        key = (layout.num_data_ranks, row_tokens)
        if key not in self.works:
            fold = _fold(layout.num_data_ranks, self.documents_of_a_step)
            self.works[key] = workload_of(
                self.profile.samples,
                self.config,
                num_steps=min(self.num_steps, _DEALT_STEPS),
                global_batch_tokens=self.batch_tokens // fold,
                row_tokens=row_tokens,
                num_ranks=layout.num_data_ranks // fold,
                seed=self.seed,
                lora=self.lora,
            )
        return replace(
            self.works[key],
            tensor_degree=layout.tensor,
            splits_tokens=layout.splits_tokens,
            num_steps=self.num_steps,
        )


def _fold(num_ranks: int, num_documents: int) -> int:
    """Part of the ranks, and of a step's documents, that is dealt: the largest with few enough.

    Ranks are dealt alike, so a part of them has the same rows; the heaviest of fewer ranks is a
    little lighter.
    """
    legal = divisors(num_ranks)
    return next((fold for fold in legal if num_documents <= fold * _DEALT_DOCUMENTS), legal[-1])
