"""Is this schedule complete, and can it run? Errors show the schedule with the cell marked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from phalanx.errors import CheckError, nearest_numbers
from phalanx.policy import Step

KINDS = ("F", "B", "I", "W")
Cell = tuple[int, int]  # rank, slot


def format_grid(
    lists: Sequence[Sequence[object]],
    mark: Iterable[Cell] = (),
    *,
    max_slots: int = 16,
    max_ranks: int = 16,
) -> str:
    """A schedule as text: a row per rank, a column per slot, marked cells as [2F0].

    Args:
        lists: cells of each rank in order, printed with `str`; None leaves a cell empty.
        mark: (rank, slot) of cells to mark; a slot behind the end of a list marks what is missing.
        max_slots: columns shown, around the first mark.
        max_ranks: rows shown, likewise.
    """
    marked = set(mark)
    focus = min(marked, default=(0, 0))
    num_slots = max([len(row) for row in lists] + [slot + 1 for _, slot in marked], default=0)
    ranks = _window(focus[0], len(lists), max_ranks)
    slots = _window(focus[1], num_slots, max_slots)

    def cell(rank: int, slot: int) -> str:
        row = lists[rank]
        text = "" if slot >= len(row) or row[slot] is None else str(row[slot])
        return f"[{text or '?'}]" if (rank, slot) in marked else f" {text} "

    table = [["slot", *(f" {slot} " for slot in slots)]]
    table += [[f"rank {rank}", *(cell(rank, slot) for slot in slots)] for rank in ranks]
    widths = [max(len(line[column]) for line in table) for column in range(len(slots) + 1)]
    lines = ["".join(text.rjust(w) for text, w in zip(line, widths)).rstrip() for line in table]
    hidden = [f"{len(lists) - len(ranks)} more ranks"] if len(ranks) < len(lists) else []
    hidden += [f"{num_slots - len(slots)} more slots"] if len(slots) < num_slots else []
    return "\n".join(lines + ([f"({' and '.join(hidden)} not shown)"] if hidden else []))


def _window(focus: int, size: int, most: int) -> range:
    first = max(0, min(focus - most // 2, size - most))
    return range(first, min(size, first + most))


def check_order(
    lists: Sequence[Sequence[Step]],
    num_stages: int,
    num_items: int,
    rank_of_stage: Sequence[int],
    place: Callable[[int, int], str] = "rank {}, slot {}".format,
) -> None:
    """Raise unless a compute-only schedule is complete and can run.

    Each stage runs every item forward once and backward once, whole (B) or as input gradient (I)
    and weight gradient (W); a schedule without any backward step is one of inference. A forward
    needs that of the stage before; B and I need the B or I of the stage after and the forward; W
    needs I. Every rank runs its list in order.

    Args:
        lists: steps of each rank.
        num_stages, num_items: how many there are.
        rank_of_stage: index into `lists` of the rank that holds each stage.
        place: what errors call a cell, from its rank and slot.

    Raises:
        CheckError: `order/illegal` for a step that no stage, item or rank can have,
            `order/doubled`, `order/missing`, `check/deadlock`; all print the grid, marked.
    """
    try:
        cell_of = _cells(lists, num_stages, num_items, rank_of_stage)
        _require_complete(lists, num_stages, num_items, rank_of_stage, cell_of)
        _require_progress(lists, num_stages)
    except _Faulty as fault:
        grid = format_grid(lists, fault.cells)
        where = place(*fault.cells[0])
        raise CheckError(
            fault.code, where, fault.value, fault.rule, legal=fault.legal, detail=grid
        ) from None


class _Faulty(Exception):
    """What is wrong, and in which cells; the first one names the place."""

    def __init__(
        self,
        code: str,
        cells: Sequence[Cell],
        value: object,
        rule: str,
        legal: Iterable[object] = (),
    ) -> None:
        super().__init__(rule)
        self.code, self.cells, self.value = code, cells, value
        self.rule, self.legal = rule, legal


def _cells(
    lists: Sequence[Sequence[Step]], num_stages: int, num_items: int, rank_of_stage: Sequence[int]
) -> dict[Step, Cell]:
    """Where each step stands."""
    cell_of: dict[Step, Cell] = {}
    for rank, steps in enumerate(lists):
        for slot, step in enumerate(steps):
            here = [(rank, slot)]
            if step.kind not in KINDS:
                raise _Faulty("order/illegal", here, step, "no such kind", KINDS)
            for name, value, size in (
                ("stage", step.stage, num_stages),
                ("item", step.item, num_items),
            ):
                if not 0 <= value < size:
                    rule = f"there are {size} {name}s"
                    near = nearest_numbers(value, range(size), 1)
                    raise _Faulty("order/illegal", here, step, rule, near)
            if rank_of_stage[step.stage] != rank:
                rule = f"rank {rank_of_stage[step.stage]} holds stage {step.stage}"
                raise _Faulty("order/illegal", here, step, rule)
            if step in cell_of:
                rule = "comes twice"
                raise _Faulty("order/doubled", [*here, cell_of[step]], step, rule)
            cell_of[step] = here[0]
    return cell_of


def _require_complete(
    lists: Sequence[Sequence[Step]],
    num_stages: int,
    num_items: int,
    rank_of_stage: Sequence[int],
    cell_of: dict[Step, Cell],
) -> None:
    trains = any(step.kind != "F" for step in cell_of)
    for stage in range(num_stages):
        rank = rank_of_stage[stage]
        end = [(rank, len(lists[rank]))]
        for item in range(num_items):
            has = [kind for kind in KINDS if Step(stage, kind, item) in cell_of]
            if "B" in has and len(has) > 2:
                step = Step(stage, "I" if "I" in has else "W", item)
                rule = f"comes beside the whole backward pass {Step(stage, 'B', item)}"
                cells = [cell_of[step], cell_of[Step(stage, "B", item)]]
                raise _Faulty("order/doubled", cells, step, rule)
            missing = "" if "F" in has else "F"
            if trains and not missing and "B" not in has:
                missing = next((kind for kind in "IW" if kind not in has), "")
                missing = "B" if has == ["F"] else missing
            if missing:
                step = Step(stage, missing, item)
                raise _Faulty("order/missing", end, step, "is missing")


def _require_progress(lists: Sequence[Sequence[Step]], num_stages: int) -> None:
    done: set[Step] = set()
    at = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(lists):
            while at[rank] < len(steps) and not any(_lacking(steps[at[rank]], done, num_stages)):
                done.add(steps[at[rank]])
                at[rank] += 1
                moved = True
    heads = [(rank, at[rank]) for rank, steps in enumerate(lists) if at[rank] < len(steps)]
    if heads:
        rank, slot = heads[0]
        step = lists[rank][slot]
        needs = " and ".join(map(str, _lacking(step, done, num_stages)))
        rule = f"can never start: it needs {needs}, which waits in turn; first waiting cells marked"
        raise _Faulty("check/deadlock", heads, step, rule)


def _lacking(step: Step, done: set[Step], num_stages: int) -> Iterator[Step]:
    """Steps that `step` needs and that are not done."""
    stage, kind, item = step
    if kind == "F":
        needed = [Step(stage - 1, "F", item)] if stage else []
    elif kind == "W":
        needed = [Step(stage, "I", item)]
    else:
        needed = [Step(stage, "F", item)]
        if stage < num_stages - 1 and Step(stage + 1, "I", item) not in done:
            needed.append(Step(stage + 1, "B", item))
    return (each for each in needed if each not in done)
