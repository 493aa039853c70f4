"""A schedule that somebody wrote down, or that another program found."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import PlanError, shown
from phalanx.policies.pipeline import require_sizes
from phalanx.policy import Order, Step
from phalanx.registry import Source, register

SOURCE = Source(
    title="torch.distributed.pipelining",
    id="pytorch 2.13",
    where="schedules.py: the compute-only text form of a schedule",
)


@register("pipeline", "listed", grain="stage", source=SOURCE)
@dataclass(frozen=True, slots=True, kw_only=True)
class Listed(Order):
    """The lists are given: a row per rank, its passes in order, separated by commas, each as stage,
    kind and micro-batch. "0F0" is a forward pass, "0B0" a whole backward pass, "0I0" and "0W0" its
    input gradient and its weight gradient. A rank holds the stages that occur in its row.

    Symbols: p ranks, m micro-batches (see the package), both those of the rows.

    Costs: those of what is written; `phalanx simulate` plays it.

    Source: the text form is that of torch's pipelining runtime (compute only), which reads it.

    Differences and limits: for one number of ranks and of micro-batches. A list that lacks a pass,
    has one twice or can never finish is refused before any process starts, with the cell.

    Args:
        rows: one text per rank; `schedule_file` makes them from a CSV file.
    """

    rows: tuple[str, ...]

    @property
    def only_size(self) -> tuple[int, int]:
        """Ranks and micro-batches that the rows are for."""
        return len(self.rows), self.least_items(len(self.rows))

    def num_stages(self, num_ranks: int) -> int:
        """The highest stage of the rows, and all below it.

        Raises:
            PlanError: `order/illegal` for another number of ranks than rows.
        """
        _require_written("ranks of the pipeline", num_ranks, len(self.rows))
        return max(step.stage for steps in self._lists() for step in steps) + 1

    def rank_of_stage(self, num_ranks: int) -> tuple[int, ...]:
        """The rank whose row has it.

        Raises:
            PlanError: `order/missing` for a stage that no row has.
        """
        holders = {step.stage: rank for rank, steps in enumerate(self._lists()) for step in steps}
        for stage in range(max(holders) + 1):
            if stage not in holders:
                raise PlanError("order/missing", "rows", None, f"no row has stage {stage}")
        return tuple(holders[stage] for stage in sorted(holders))

    def least_items(self, num_ranks: int) -> int:
        """As many as the rows have."""
        return max(step.item for steps in self._lists() for step in steps) + 1

    def wanted_items(self, num_ranks: int) -> int:
        """One for each rank, as far as the rows go; a step is filled up to what is written."""
        return min(num_ranks, self.least_items(num_ranks))

    def most_items(self, num_ranks: int) -> int:
        """As many as the rows have."""
        return self.least_items(num_ranks)

    def order(self, num_ranks: int, num_items: int) -> list[list[Step]]:
        """The list of each rank.

        Raises:
            PlanError: `order/illegal` for other sizes than those of the rows, and for what is no
                pass.
        """
        require_sizes(num_ranks, num_items)
        ranks, items = self.only_size
        _require_written("ranks of the pipeline", num_ranks, ranks)
        _require_written("micro-batches of a step", num_items, items)
        return self._lists()

    def _lists(self) -> list[list[Step]]:
        lists = [
            [_parsed(rank, at, cell) for at, cell in enumerate(row.split(",")) if cell.strip()]
            for rank, row in enumerate(self.rows)
        ]
        if not any(lists):
            raise PlanError("order/missing", "rows", shown(self.rows), "there is no pass")
        return lists


def _require_written(name: str, value: int, written: int) -> None:
    if value != written:
        rule = f"the schedule is written for {written}"
        raise PlanError("order/illegal", name, value, rule, legal=[written])


def _parsed(rank: int, at: int, cell: str) -> Step:
    step = Step.parse(cell.strip())
    if step is None:
        rule = "is no pass: stage, one of F B I W, micro-batch"
        where = f"rows[{rank}], cell {at}"
        raise PlanError("order/illegal", where, shown(cell), rule, legal=["0F0"])
    return step
