"""Passes 2 and 3: context, expert and tensor specs exchange activations around computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phalanx.action import Action, Collective, Compute
from phalanx.lower.chunk import SPLIT_PLACEMENTS, Chunk, Placed
from phalanx.policy import Exchange, Spec
from phalanx.workload import Block


def exchange_activations(chunks: list[Chunk], placed: Placed, spec: Spec) -> None:
    """Weave the collectives of `spec` around each compute whose modules its rules name.

    Rules match "<block>.<module>" (or the block itself). The exchanges of a compute's modules come
    in module order in a forward pass and in reverse in a backward pass. A compute whose modules are
    split does 1/degree of the work. Payload: tokens x the block's output width.
    """
    degree = placed.mesh.degree(spec.axis)
    if degree == 1:
        return
    blocks = {block.name: block for unit in placed.work.units for block in unit.blocks}
    for chunk in chunks:
        chunk.actions = _woven(chunk, placed, spec, blocks, degree)


def _woven(
    chunk: Chunk, placed: Placed, spec: Spec, blocks: dict[str, Block], degree: int
) -> list[Action]:
    out: list[Action] = []
    pending: tuple[str, ...] = ()  # exchanges that the next compute must wait for
    for action in chunk.actions:
        if not isinstance(action, Compute):
            out.append(action)
            continue
        inside = _blocks_of(action, placed, blocks)
        before = _collectives(action, inside, spec, "before")
        after = _collectives(action, inside, spec, "after")
        share = 1.0 / degree if _is_split(inside, spec) else 1.0
        out.extend(_chain(before, pending))
        pending = (before[-1].label,) if before else pending
        out.append(
            replace(
                action,
                after=(*action.after, *pending),
                flops=action.flops * share,
                moved_bytes=action.moved_bytes * share,
            )
        )
        out.extend(_chain(after, (action.label,)))
        pending = (after[-1].label,) if after else ()
    return out


def _blocks_of(action: Compute, placed: Placed, blocks: dict[str, Block]) -> list[Block]:
    if action.layer in blocks:
        return [blocks[action.layer]]
    inside = list(placed.unit_of[action.layer].blocks)
    return inside if action.phase == "F" else inside[::-1]


def _exchanges(
    inside: list[Block], spec: Spec, phase: str, at: str
) -> Iterator[tuple[Block, Exchange]]:
    for block in inside:
        names = [f"{block.name}.{module.name}" for module in block.modules]
        for name in [block.name, *(names if phase == "F" else reversed(names))]:
            rule = spec.rule_for(name)
            for exchange in rule.exchanges if rule else ():
                if (exchange.phase, exchange.at, exchange.of) == (phase, at, "activations"):
                    yield block, exchange


def _collectives(action: Compute, inside: list[Block], spec: Spec, at: str) -> list[Collective]:
    phase = "F" if action.phase == "F" else "B"
    if action.phase == "W":  # weight gradients need nothing from other ranks
        return []
    flow = "act" if phase == "F" else "grad"
    found = list(_exchanges(inside, spec, phase, at))
    return [
        Collective(
            collective=exchange.collective,
            axis=spec.axis,
            lane=f"axis:{spec.axis}",
            label=f"{action.label}@{spec.axis}{'' if at == 'after' else '<'}{index or ''}",
            phase=action.phase,
            item=action.item,
            stage=action.stage,
            layer=block.name,
            tensor=f"{flow}:{action.stage}.{action.item}",
            payload_bytes=action.num_tokens * block.out_bytes_per_token,
        )
        for index, (block, exchange) in enumerate(found)
    ]


def _chain(collectives: list[Collective], first: tuple[str, ...]) -> list[Collective]:
    """Each waits for the one before it."""
    out = []
    for collective in collectives:
        out.append(replace(collective, after=(*collective.after, *first)))
        first = (collective.label,)
    return out


def _is_split(inside: list[Block], spec: Spec) -> bool:
    names = [f"{block.name}.{module.name}" for block in inside for module in block.modules]
    rules = [spec.rule_for(name) for name in names]
    return any(rule is not None and rule.placement in SPLIT_PLACEMENTS for rule in rules)
