"""What of a decoder the ranks of a pipeline hold and run. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from phalanx.models.config import DecoderConfig
from phalanx.models.operators import Operator
from phalanx.policy import Order, Step


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The stages of a decoder on the ranks of a pipeline.

    Attributes:
        order: the schedule; None where one rank holds all.
        num_ranks: of the pipeline axis.
        stages: first layer of each stage and the one behind its last.
        tied_head: the last stage holds the embedding too.
    """

    order: Order | None
    num_ranks: int
    stages: Sequence[tuple[int, int]]
    tied_head: bool

    @classmethod
    def whole(cls, config: DecoderConfig) -> Pipeline:
        """One rank that holds everything."""
        return cls(order=None, num_ranks=1, stages=[(0, config.num_layers)], tied_head=False)

    @classmethod
    def of(
        cls,
        config: DecoderConfig,
        order: Order,
        num_ranks: int,
        stages: Sequence[Sequence[int]],
    ) -> Pipeline:
        """From the entries of a plan.

        Args:
            stages: [[start, stop], ...] as `RoleProgram.batch` has them.
        """
        ranges = [(int(start), int(stop)) for start, stop in stages]
        return cls(order=order, num_ranks=num_ranks, stages=ranges, tied_head=config.tied_head)

    @property
    def num_stages(self) -> int:
        """Of the decoder."""
        return len(self.stages)

    @cached_property
    def rank_of_stage(self) -> tuple[int, ...]:
        """Coordinate on the pipeline axis that holds each stage."""
        return (0,) if self.order is None else self.order.rank_of_stage(self.num_ranks)

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, in model order."""
        return [stage for stage, holder in enumerate(self.rank_of_stage) if holder == rank]

    def stage_of_layer(self, layer: int) -> int:
        """The stage that holds a layer."""
        return self._stage_of_layer[layer]

    @cached_property
    def _stage_of_layer(self) -> list[int]:
        return [at for at, (start, stop) in enumerate(self.stages) for _ in range(start, stop)]

    def stages_of_operator(self, op: Operator) -> Sequence[int]:
        """Where an operator runs: tables of positions everywhere, all else once."""
        if op.op == "rope":
            return range(self.num_stages)
        if op.layer is not None:
            return (self.stage_of_layer(op.layer),)
        is_end = op.op == "head" or op.name == "model.norm"
        return (self.num_stages - 1,) if is_end else (0,)

    def runs(self, stage: int, op: Operator) -> bool:
        """Whether a stage runs an operator."""
        return stage in self.stages_of_operator(op)

    def stages_of_module(self, name: str) -> Sequence[int]:
        """Which stages hold a module or a tensor, by its canonical name."""
        parts = name.split(".")
        if parts[1:2] == ["layers"]:
            return (self.stage_of_layer(int(parts[2])),)
        last = self.num_stages - 1
        if name.startswith(("lm_head", "model.norm")):
            return (last,)
        is_tied = self.tied_head and name.startswith("model.embed_tokens.")
        return (0, last) if is_tied else (0,)

    def units_by_stage(self, names: Iterable[str]) -> list[list[str]]:
        """Units of the decoder, in model order, as `lower` takes them: by the stage that runs them.

        Args:
            names: of units, as `planner.work.model_work` has them.
        """
        stages: list[list[str]] = [[] for _ in range(self.num_stages)]
        for name in names:
            at = -1 if name == "lm_head" else self.stages_of_module(name)[0]
            stages[at].append(name)
        return stages

    def holds(self, rank: int, name: str) -> bool:
        """Whether a rank holds a tensor."""
        return any(self.rank_of_stage[stage] == rank for stage in self.stages_of_module(name))

    def shares_embedding(self) -> bool:
        """Whether two ranks hold the embedding, whose gradients they sum."""
        return self.tied_head and self.rank_of_stage[0] != self.rank_of_stage[-1]

    def lists(self, num_items: int) -> list[list[Step]]:
        """The passes of each rank."""
        if self.order is None:
            return [[Step(0, kind, item) for item in range(num_items) for kind in "FB"]]
        return self.order.order(self.num_ranks, num_items)

    def most_live(
        self,
        rank: int,
        num_items: int,
        per_stage: Sequence[float],
        waiting: Sequence[float] = (),
    ) -> float:
        """The most that a rank keeps of micro-batches under way.

        Args:
            per_stage: what one of them leaves on each stage, between its forward and its last
                backward pass there.
            waiting: what the input gradient ("I") leaves beside it until the weight gradient; ():
                nothing.
        """
        steps = self.lists(num_items)[rank]
        return max(_kept(steps, per_stage, waiting or [0.0] * self.num_stages), default=0.0)


def _kept(
    steps: Sequence[Step], per_stage: Sequence[float], waiting: Sequence[float]
) -> Iterator[float]:
    """What is kept after each pass."""
    kept = 0.0
    for step in steps:
        if step.kind == "F":
            kept += per_stage[step.stage]
        elif step.kind == "I":
            kept += waiting[step.stage]
        else:
            kept -= per_stage[step.stage]
            kept -= waiting[step.stage] if step.kind == "W" else 0.0
        yield kept
