"""Pass 4: data specs gather parameters before computes, free them after, and reduce gradients.

A visit is the run of computes of one unit within one step. With `prefetch` p the gather of a visit
is issued before the compute of the p-th visit before it, and may start once the visit before that
has ended: at most p + 1 gathered units wait at a time (FSDP's rate limit), and in a backward pass
the next gather is queued before this unit's reduction, which shares its lane (PyTorch FSDP paper,
section 3.3.2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from phalanx.action import Alloc, Collective, Free
from phalanx.lower.chunk import Chunk, Placed
from phalanx.policy import Exchange, Rule, Spec, Step

CUTTING_PLACEMENTS = ("shard", "update")  # of gradients and optimizer state


@dataclass
class _Visit:
    chunk: Chunk
    unit: str
    labels: list[str]  # of its actions on activations, in order
    rule: Rule
    freed: str = ""  # label of the Free that ends it, if one does

    @property
    def first(self) -> str:
        return self.labels[0]

    @property
    def last(self) -> str:
        return self.labels[-1]

    @property
    def phase(self) -> str:
        return "F" if self.chunk.step.kind == "F" else "B"


def exchange_parameters(chunks: list[Chunk], placed: Placed, spec: Spec) -> None:
    """Weave the parameter and gradient collectives of `spec` into one rank's chunks.

    Payloads: the unit's parameters in `param_bytes` (gather) or gradients in `grad_bytes`
    (reduce), each parameter padded to equal shards of dim 0 over the axis, after the cuts of model
    axes and of the data axes that came before.
    """
    degree = placed.mesh.degree(spec.axis)
    if degree == 1:
        return
    visits = [visit for chunk in chunks for visit in _visits(chunk, placed, spec)]
    remaining = Counter((visit.unit, visit.phase) for visit in visits)
    in_row = round_items([chunk.step for chunk in chunks])
    num_passed: Counter[str] = Counter()  # passes that gave a unit's gradients
    gathered: set[str] = set()
    freed_at: dict[str, int] = {}  # unit -> the visit after which it was last given back
    reduced: dict[str, str] = {}  # unit -> label of its latest reduction
    for at, visit in enumerate(visits):
        remaining[visit.unit, visit.phase] -= 1
        gather = _exchange(visit, "before", "params")
        # gradients of weights are made from inputs and gradients, without the weights
        if gather and visit.unit not in gathered and visit.chunk.step.kind != "W":
            _gather(visits, at, freed_at.get(visit.unit, -1), placed, spec, gather)
            gathered.add(visit.unit)
        keeps = not visit.rule.reshard and remaining[visit.unit, "B"] > 0
        if visit.unit in gathered and not keeps:
            _free(visit)
            freed_at[visit.unit] = at
            gathered.discard(visit.unit)
        exchange = _exchange(visit, "after", "grads")
        if exchange and visit.chunk.step.kind != "I":
            if visit.unit in reduced:  # until then the unit's buffer is under way
                _let_wait(visit, reduced[visit.unit])
            num_passed[visit.unit] += 1
            row_ends = exchange.when == "round" and num_passed[visit.unit] % in_row == 0
            is_due = exchange.when == "always" or row_ends or remaining[visit.unit, "B"] == 0
            if is_due and (label := _reduce(visit, placed, spec, exchange, degree)):
                reduced[visit.unit] = label
    _shard_held(visits, placed, degree)


def gather_updated(
    units: Iterable[str], placed: Placed, specs: Sequence[Spec], after: str
) -> list[Collective]:
    """Gathers of the weights that ranks have updated a part of each, one after another.

    Args:
        units: names of those that the rank holds.
        after: label of the update.
    """
    found: list[Collective] = []
    for spec in specs:
        degree = placed.mesh.degree(spec.axis)
        for unit in units if degree > 1 else ():
            rule = spec.rule_for(unit)
            sent = [e for e in rule.exchanges if e.phase == "O"] if rule else []
            elements = placed.padded_gradients(unit, degree)
            if not (sent and elements):
                continue
            found.append(
                Collective(
                    collective=sent[0].collective,
                    axis=spec.axis,
                    lane=f"axis:{spec.axis}",
                    label=f"gather:{unit}:O",
                    after=(after,),
                    layer=unit,
                    tensor=f"{unit}/updated",
                    into=f"{unit}/full",
                    payload_bytes=float(elements * placed.work.param_bytes),
                )
            )
    return found


def round_items(steps: Sequence[Step]) -> int:
    """Micro-batches that a stage takes in a row in the backward passes of one rank.

    1 where the rank has one stage. Where its rows differ, the shortest of those that are not the
    last of their stage: any number of a stage's micro-batches may be reduced together.
    """
    passes = [step for step in steps if step.kind in ("B", "W")]
    if len({step.stage for step in passes}) < 2:
        return 1
    rows = [(stage, len(list(row))) for stage, row in groupby(passes, lambda step: step.stage)]
    last = {stage: at for at, (stage, _) in enumerate(rows)}
    lengths = {length for at, (stage, length) in enumerate(rows) if at != last[stage]}
    longest = max(length for _, length in rows)
    return longest if lengths <= {longest} else min(lengths)


def _visits(chunk: Chunk, placed: Placed, spec: Spec) -> list[_Visit]:
    """The visits of units that `spec` has a rule for."""
    labels: dict[str, list[str]] = {unit: [] for unit in chunk.units}
    owner = {b.name: unit for unit in chunk.units for b in placed.unit_of[unit].blocks}
    for action in chunk.actions:
        if action.phase == chunk.step.kind and action.label:
            labels[owner.get(action.layer, action.layer)].append(action.label)
    ruled = [(unit, rule) for unit in chunk.units if (rule := spec.rule_for(unit)) is not None]
    return [_Visit(chunk, unit, labels[unit], rule) for unit, rule in ruled]


def _exchange(visit: _Visit, at: str, of: str) -> Exchange | None:
    found = [e for e in visit.rule.exchanges if (e.phase, e.at, e.of) == (visit.phase, at, of)]
    return found[0] if found else None


def _position(chunk: Chunk, label: str) -> int:
    return next(at for at, action in enumerate(chunk.actions) if action.label == label)


def _free(visit: _Visit) -> None:
    visit.freed = f"free:{visit.unit}:{visit.phase}{visit.chunk.step.item}"
    at = _position(visit.chunk, visit.last) + 1
    visit.chunk.actions[at:at] = [Free(tensor=f"{visit.unit}/full", label=visit.freed)]


def _may_start_after(visits: list[_Visit], at: int, previous: int) -> tuple[str, ...]:
    """What must have ended before the gather of visit `at`: the visit that leaves room for it, or
    the unit's own previous visit, whichever is later."""
    visit = visits[at]
    before = max(at - visit.rule.prefetch - 1, previous)
    return (visits[before].freed or visits[before].last,) if before >= 0 else ()


def _gather(
    visits: list[_Visit], at: int, previous: int, placed: Placed, spec: Spec, exchange: Exchange
) -> None:
    visit = visits[at]
    degree = placed.mesh.degree(spec.axis)
    payload = placed.padded_params(visit.unit, degree) * placed.work.param_bytes
    label = f"gather:{visit.unit}:{visit.phase}{visit.chunk.step.item}"
    ahead = visits[max(0, at - visit.rule.prefetch)]
    waits = _may_start_after(visits, at, previous)
    lane, step = f"axis:{spec.axis}", visit.chunk.step
    gather = [
        Alloc(
            tensor=f"{visit.unit}/full",
            num_bytes=payload,
            after=waits,
            lane=lane,
            item=step.item,
            stage=step.stage,
        ),
        Collective(
            collective=exchange.collective,
            axis=spec.axis,
            label=label,
            lane=lane,
            after=waits,
            item=step.item,
            stage=step.stage,
            layer=visit.unit,
            tensor=f"{visit.unit}/shard",
            into=f"{visit.unit}/full",
            payload_bytes=float(payload),
        ),
    ]
    place = _position(ahead.chunk, ahead.first)
    ahead.chunk.actions[place:place] = gather
    _let_wait(visit, label)


def _let_wait(visit: _Visit, label: str) -> None:
    computes = visit.chunk.computes()
    visit.chunk.wait(next(at for at, a in computes if a.label in visit.labels), label)


def _reduce(visit: _Visit, placed: Placed, spec: Spec, exchange: Exchange, degree: int) -> str:
    """Insert the reduction of a visit's gradients; its label, or "" for a frozen unit."""
    unit, item = visit.unit, visit.chunk.step.item
    before = placed.reduced.get((unit, item))
    share = placed.sharded.get(unit, 1)
    scatters = exchange.collective == "reduce_scatter"
    elements = placed.padded_gradients(unit, share * degree if scatters else share) // share
    if not elements:
        return ""
    label = f"reduce:{unit}:{item}" + ("" if before is None else f"@{spec.axis}")
    reduce = Collective(
        collective=exchange.collective,
        axis=spec.axis,
        lane=f"axis:{spec.axis}",
        label=label,
        after=(visit.last if before is None else before,),
        item=item,
        stage=visit.chunk.step.stage,
        layer=unit,
        tensor=f"{unit}/grad",
        payload_bytes=float(elements * placed.work.grad_bytes),
    )
    at = _position(visit.chunk, visit.last if before is None else before) + 1
    visit.chunk.actions[at:at] = [reduce]
    placed.reduced[unit, item] = label
    return label


def _shard_held(visits: list[_Visit], placed: Placed, degree: int) -> None:
    cut = {visit.unit: visit.rule for visit in visits if visit.rule.placement in CUTTING_PLACEMENTS}
    for unit, rule in cut.items():
        placed.sharded[unit] = placed.sharded.get(unit, 1) * degree
        if rule.placement == "update":
            placed.whole.add(unit)
