"""Pass 1: the schedule's steps become computes and the activations that they keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from phalanx.action import Action, Alloc, Compute, Free
from phalanx.lower.chunk import Chunk, Placed
from phalanx.policy import Step
from phalanx.workload import Block, Unit

GRAINS = ("stage", "unit", "operator")

_RELEASES = ("B", "W")  # the pass after which a micro-batch's activations are no longer needed


def expand_steps(steps: Sequence[Step], placed: Placed, grain: str) -> list[Chunk]:
    """One chunk per step: its computes in execution order, between Alloc and Free of what it saves.

    Args:
        steps: one rank's list.
        placed: units of each stage.
        grain: "stage", "unit" or "operator".
    """
    return [_chunk(step, placed, grain) for step in steps]


def _chunk(step: Step, placed: Placed, grain: str) -> Chunk:
    units = placed.stages[step.stage]
    ordered = units if step.kind == "F" else tuple(reversed(units))
    num_tokens = placed.work.item_tokens[step.item]
    saved = f"saved:{step.stage}.{step.item}"
    actions: list[Action] = []
    if step.kind == "F":
        per_token = sum(b.saved_bytes_per_token for u in units for b in u.blocks)
        num_bytes = placed.tokens_between(step.item) * per_token
        actions.append(Alloc(tensor=saved, num_bytes=num_bytes))
    for name, op, blocks in _pieces(units, step, grain):
        flops = num_tokens * sum(block.pass_flops_per_token(step.kind) for block in blocks)
        params = sum(block.num_params for block in blocks)
        actions.append(
            Compute(
                op=f"{op}.{step.kind}",
                label=f"{step}/{name}" if name else str(step),
                phase=step.kind,
                item=step.item,
                stage=step.stage,
                layer=name,
                flops=flops,
                moved_bytes=float(params * placed.work.param_bytes),
                num_tokens=num_tokens,
            )
        )
    if step.kind in _RELEASES:
        actions.append(Free(tensor=saved))
    return Chunk(step, actions, tuple(unit.name for unit in ordered))


def _pieces(
    units: Sequence[Unit], step: Step, grain: str
) -> Iterator[tuple[str, str, Sequence[Block]]]:
    """(layer name, op, blocks) of each compute, backwards in a backward pass."""
    turn = 1 if step.kind == "F" else -1
    if grain == "stage":
        yield "", "stage", [block for unit in units for block in unit.blocks]
        return
    for unit in units[::turn]:
        if grain == "unit":
            yield unit.name, "unit", unit.blocks
        else:
            yield from ((block.name, block.op, [block]) for block in unit.blocks[::turn])
