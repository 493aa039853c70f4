"""Passes 2 and 3: context, expert and tensor specs exchange activations around computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import ceil

from phalanx.action import Action, Collective, Compute
from phalanx.lower.attention_exchange import (
    OF_HEADS,
    RING_PLACEMENT,
    WANTED_PLACEMENT,
    heads_bytes,
)
from phalanx.lower.chunk import PARTIAL_PLACEMENT, SPLIT_PLACEMENTS, Chunk, Placed
from phalanx.policy import Exchange, Rule, Spec, Step
from phalanx.workload import Block


class _Rules:
    """A spec that looks the rule of a module up once: every micro-batch asks for it again."""

    def __init__(self, spec: Spec) -> None:
        self.axis = spec.axis
        self.rule_for = cache(spec.rule_for)
        rows = spec.rule_for("")
        self.layout = "" if rows is None else rows.placement

    def around(self, block: Block) -> Rule | None:
        """The rule of a block; one with a window may have a rule for that."""
        if block.heads is not None and block.heads.window is not None:
            rule = self.rule_for(f"{block.name}.window")
            if rule is not None and rule.placement == WANTED_PLACEMENT:
                return rule
        return self.rule_for(block.name)


def exchange_activations(chunks: list[Chunk], placed: Placed, spec: Spec) -> None:
    """Weave the collectives of `spec` around each compute whose modules its rules name.

    Rules match "<block>.<module>" (or the block itself). The exchanges of a compute's modules come
    in module order in a forward pass and in reverse in a backward pass. A compute whose modules are
    split (or work on a part of the tokens or heads) does 1/degree of the work. Payload: tokens x
    the block's output width, tokens padded to equal parts where they are gathered or scattered;
    what attention exchanges by head is `attention_exchange.heads_bytes`.

    Exchanges of a ring run beside the attention that they belong to, and what comes next waits for
    both; at either end of a step, or where a compute is more than one block, they are waited for
    like any other.

    The first gather of a step turns the handle that enters the step into the one that leaves it, so
    that ops find their whole input there; of the model's last block it gathers the output, from
    which the backward pass starts.
    """
    if placed.mesh.degree(spec.axis) == 1:
        return
    blocks = {block.name: block for unit in placed.work.units for block in unit.blocks}
    rules = _Rules(spec)
    for chunk in chunks:
        chunk.actions = _woven(chunk, placed, rules, blocks)


def _woven(chunk: Chunk, placed: Placed, spec: _Rules, blocks: dict[str, Block]) -> list[Action]:
    out: list[Action] = []
    pending: tuple[str, ...] = ()  # exchanges that the next compute must wait for
    enters = _entering(chunk.step, placed)
    degree, inner = placed.mesh.degree(spec.axis), _between_others(chunk)
    previous: tuple[str, ...] = ()  # the compute before
    for action in chunk.actions:
        if not isinstance(action, Compute):
            out.append(action)
            continue
        inside = _blocks_of(action, placed, blocks)
        before = _collectives(action, inside, spec, "before", placed)
        after = _collectives(action, inside, spec, "after", placed)
        if enters and before and before[0].tensor == _flow(action):
            before[0] = replace(before[0], tensor=enters, into=_flow(action))
        enters = ""
        share = 1.0 / degree if _is_split(inside, spec) else 1.0
        if action.label in inner and _is_ring(action, inside, spec):
            beside = _chain([*before, *after], pending or previous)
            chunk.beside[action.label] = tuple(each.label for each in beside[-1:])
            out.extend(beside)
            before = after = []
        out.extend(_chain(before, pending or previous if _of_heads(before) else pending))
        pending = (before[-1].label,) if before else pending
        out.append(
            replace(
                action,
                after=(*action.after, *pending),
                flops=action.flops * share,
                moved_bytes=action.moved_bytes * share,
            )
        )
        ended = (action.label, *chunk.beside.get(action.label, ()))
        out.extend(_chain(after, ended))
        pending = (after[-1].label,) if after else ended[1:]
        previous = (action.label,)
    return out


def _blocks_of(action: Compute, placed: Placed, blocks: dict[str, Block]) -> list[Block]:
    if action.layer in blocks:
        return [blocks[action.layer]]
    inside = list(placed.unit_of[action.layer].blocks)
    return inside if action.phase == "F" else inside[::-1]


def _between_others(chunk: Chunk) -> set[str]:
    """Labels of the computes that are neither the first nor the last of their step."""
    return {compute.label for _, compute in chunk.computes()[1:-1]}


def _is_ring(action: Compute, inside: list[Block], spec: _Rules) -> bool:
    """Whether the compute is one block whose exchanges go round a ring."""
    rule = spec.around(inside[0]) if action.layer == inside[0].name else None
    return rule is not None and rule.placement == RING_PLACEMENT


def _of_heads(collectives: Sequence[Collective]) -> bool:
    """Whether they carry what the compute before has made, not what enters the block."""
    return any(each.tensor.startswith(OF_HEADS) for each in collectives)


def _exchanges(
    inside: list[Block], spec: _Rules, phase: str, at: str
) -> Iterator[tuple[Block, Rule, Exchange]]:
    for block in inside:
        names = [f"{block.name}.{module.name}" for module in block.modules]
        around = spec.around(block)
        rules = [spec.rule_for(name) for name in (names if phase == "F" else reversed(names))]
        # an embedding is a block and its only module: one rule, applied once
        for rule in [around, *(rule for rule in rules if rule != around)]:
            if rule is None:
                continue
            for exchange in rule.exchanges:
                is_of_flow = exchange.of in ("activations", "inputs", *OF_HEADS)
                if is_of_flow and (exchange.phase, exchange.at) == (phase, at):
                    yield block, rule, exchange


def _collectives(
    action: Compute, inside: list[Block], spec: _Rules, at: str, placed: Placed
) -> list[Collective]:
    phase = "F" if action.phase == "F" else "B"
    if action.phase == "W":  # weight gradients need nothing from other ranks
        return []
    collectives = []
    degree = placed.mesh.degree(spec.axis)
    for index, (block, rule, exchange) in enumerate(_exchanges(inside, spec, phase, at)):
        tensor, into = _handles(action, block, exchange)
        if exchange.of in OF_HEADS:
            heads = placed.heads[block.name]
            payload = heads_bytes(action, heads, rule, exchange, spec.layout, degree, placed)
        else:
            payload = _num_tokens(action, exchange, degree) * block.out_bytes_per_token
        collectives.append(
            Collective(
                collective=exchange.collective,
                axis=spec.axis,
                lane=f"axis:{spec.axis}",
                label=f"{action.label}@{spec.axis}{'' if at == 'after' else '<'}{index or ''}",
                phase=action.phase,
                item=action.item,
                stage=action.stage,
                layer=block.name,
                tensor=tensor,
                into=into,
                payload_bytes=payload,
            )
        )
    return collectives


def _flow(action: Compute) -> str:
    """What leaves the action's step."""
    return f"{'act' if action.phase == 'F' else 'grad'}:{action.stage}.{action.item}"


def _handles(action: Compute, block: Block, exchange: Exchange) -> tuple[str, str]:
    """What is exchanged, and where to ("": in place)."""
    if exchange.of == "activations":
        return _flow(action), ""
    if exchange.of in OF_HEADS:
        made = f"{exchange.of}:{block.name}.{action.phase}{action.item}.{exchange.at}"
        return made, f"{made}/exchanged"
    kept = f"input:{block.name}.{action.item}"
    return kept, f"{kept}/whole"


def _num_tokens(action: Compute, exchange: Exchange, degree: int) -> int:
    if exchange.collective in ("all_gather", "reduce_scatter"):
        return ceil(action.num_tokens / degree) * degree
    return action.num_tokens


def _entering(step: Step, placed: Placed) -> str:
    """What the first compute of a step works on."""
    if step.kind == "F":
        return f"act:{step.stage - 1}.{step.item}"
    is_last = step.stage == len(placed.stages) - 1
    return f"act:{step.stage}.{step.item}" if is_last else f"grad:{step.stage + 1}.{step.item}"


def _chain(collectives: list[Collective], first: tuple[str, ...]) -> list[Collective]:
    """Each waits for the one before it."""
    out = []
    for collective in collectives:
        out.append(replace(collective, after=(*collective.after, *first)))
        first = (collective.label,)
    return out


def _is_split(inside: list[Block], spec: _Rules) -> bool:
    names = [f"{block.name}.{module.name}" for block in inside for module in block.modules]
    rules = [spec.rule_for(name) for name in names]
    divides = (*SPLIT_PLACEMENTS, PARTIAL_PLACEMENT)
    return any(rule is not None and rule.placement in divides for rule in rules)
