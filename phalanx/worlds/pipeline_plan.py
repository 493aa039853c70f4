"""What all ranks of a pipeline know before the first process starts: lists, placement, sizes."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.check_order import check_order
from phalanx.errors import PlanError
from phalanx.policy import Step


class Planned(NamedTuple):
    """Shape and dtype (as torch prints it, without "torch.") of one tensor."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


@dataclass(frozen=True, kw_only=True)
class PlannedShapes:
    """Sizes of all activations of a step. A gradient has the shape and dtype of its activation.

    Attributes:
        inputs: of each micro-batch, what enters stage 0.
        outputs: of each stage and micro-batch, what leaves it and, as it is, enters the next.
        dtype: of everything that leaves a stage.
        input_dtype: of what enters stage 0.
    """

    inputs: Sequence[tuple[int, ...]]
    outputs: Sequence[Sequence[tuple[int, ...]]]
    dtype: str
    input_dtype: str

    def entering(self, stage: int, item: int) -> Planned:
        """The input of a stage."""
        if stage == 0:
            return Planned(tuple(self.inputs[item]), self.input_dtype)
        return self.leaving(stage - 1, item)

    def leaving(self, stage: int, item: int) -> Planned:
        """The output of a stage."""
        return Planned(tuple(self.outputs[stage][item]), self.dtype)


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """One step of a pipeline.

    Attributes:
        lists: the compute-only list of each rank, as an `Order` gives it.
        rank_of_stage: the rank (coordinate on the pipeline axis) that holds each stage.
        shapes: sizes of all activations.

    Raises:
        CheckError: `order/...` or `check/deadlock` for lists with a missing, doubled or impossible
            action, with the grid.
        PlanError: `order/illegal` for a rank without a stage, lists without backward passes, and
            shapes of another number of stages or micro-batches.
    """

    lists: Sequence[Sequence[Step]]
    rank_of_stage: Sequence[int]
    shapes: PlannedShapes

    def __post_init__(self) -> None:
        if sorted(set(self.rank_of_stage)) != list(range(len(self.lists))):
            rule = f"each of the {len(self.lists)} ranks that have a list must hold a stage"
            raise PlanError("order/illegal", "rank_of_stage", self.rank_of_stage, rule)
        check_order(self.lists, self.num_stages, self.num_items, self.rank_of_stage)
        if all(step.kind == "F" for steps in self.lists for step in steps):
            raise PlanError("order/missing", "lists", None, "a step needs backward passes")
        self._require_shapes(len(self.shapes.inputs))

    def with_shapes(self, shapes: PlannedShapes) -> PipelinePlan:
        """The same lists for micro-batches of other sizes; the lists are not checked again.

        Raises:
            PlanError: `order/illegal` for another number of stages or micro-batches.
        """
        other = copy(self)
        object.__setattr__(other, "shapes", shapes)
        other._require_shapes(self.num_items)
        return other

    def _require_shapes(self, num_items: int) -> None:
        if len(self.shapes.inputs) != num_items:
            rule = "the lists are for another number of micro-batches"
            given = len(self.shapes.inputs)
            raise PlanError("order/illegal", "shapes.inputs", given, rule, legal=[num_items])
        sizes = [len(self.shapes.outputs), *map(len, self.shapes.outputs)]
        planned = [self.num_stages, *[self.num_items] * self.num_stages]
        if sizes != planned:
            rule = "shapes must name the output of each stage for each micro-batch"
            raise PlanError("order/illegal", "shapes.outputs", sizes, rule, legal=[planned])

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return len(self.rank_of_stage)

    @property
    def num_items(self) -> int:
        """Micro-batches of a step."""
        return len(self.shapes.inputs)

    def stages_of(self, rank: int) -> list[int]:
        """Stages that a rank holds, in model order."""
        return [stage for stage, holder in enumerate(self.rank_of_stage) if holder == rank]

    def require_fit(self, num_ranks: int, rank: int, stages: Sequence[int]) -> None:
        """Raise `order/illegal` unless this is the rank's group size and these are its stages."""
        if num_ranks != len(self.lists):
            rule = f"the group has {num_ranks} ranks, the plan has {len(self.lists)} lists"
            raise PlanError("order/illegal", "group", num_ranks, rule, legal=[len(self.lists)])
        if sorted(stages) != self.stages_of(rank):
            rule = f"rank {rank} must be given the modules of exactly its stages"
            legal = [self.stages_of(rank)]
            raise PlanError("order/illegal", "modules", sorted(stages), rule, legal=legal)
