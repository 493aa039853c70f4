"""Prices of the actions of a training step that sum to the step's price. No torch.

A price (`cost.training_step`) has the seconds of a step by what they are spent on. Here they are
shared out over the actions of the step's program, so that a world that plays it needs what
`phalanx plan` says and what the timeline adds:

    passes           a layer's seconds by FLOPs of its blocks; the head's to the passes that have
                     its FLOPs
    tensor, context  what computing does not hide, by the machine's own seconds for each exchange;
                     a ring runs beside attention, so it has on its lane what is hidden, and holds
                     up the passes for the rest
    data             on its lane what is hidden; the rest holds up the passes where weights are
                     sharded, else the update
    messages         as long as the price says, longer ones longer
    the update       with what the host takes once a step

Differences and limits: layers of several kinds share by FLOPs; an exchange that the price does not
know (the embedding's between the ends of a pipeline, norms on tensor ranks) takes the machine's own
seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from phalanx.action import Collective, Compute, Move, Program, Send
from phalanx.cost.base import CostModel
from phalanx.cost.model_shape import ModelShape
from phalanx.cost.training_passes import PassPrices, layer_passes
from phalanx.cost.training_plans import TrainingPlans
from phalanx.cost.training_step import StepTimes, StepWires
from phalanx.workload import StepWork

_LAYER_OPS = ("attention", "mlp")
_PHASES = ("F", "B", "I", "W")
Kind = tuple[str, str]  # axis, and what is exchanged on it


@dataclass(frozen=True, kw_only=True)
class FittedCost:
    """Seconds that sum to a priced step.

    Attributes:
        token_s: (module, or number of a stage at grain "stage"; phase) -> seconds of a token.
        update_s, once_s: of the fullest rank's update, and beside any; most_flops: of the former.
        message_s: of a message; message_bytes: of a mean one.
        factors: axis and kind of exchange -> how long it takes over the machine's own seconds.
        machine: the machine's own prices.
    """

    token_s: Mapping[tuple[str | int, str], float]
    update_s: float
    once_s: float
    most_flops: float
    message_s: float
    message_bytes: float
    factors: Mapping[Kind, float]
    machine: CostModel

    def compute_s(self, action: Compute, rank: int) -> float:
        """The module's share of its pass, or the update."""
        if action.op == "optimizer":
            return self.once_s + self.update_s * action.flops / max(self.most_flops, 1.0)
        return self.token_s[action.layer or action.stage, action.phase] * action.num_tokens

    def collective_s(self, action: Collective, members: Sequence[int]) -> float:
        """The machine's seconds times the kind's factor."""
        own_s = self.machine.collective_s(action, members)
        return own_s * self.factors.get(_kind(action), 1.0)

    def transfer_s(self, action: Send, source: int, target: int) -> float:
        """By its size."""
        return self.message_s * action.payload_bytes / max(self.message_bytes, 1.0)

    def transfer_latency_s(self, action: Send, source: int, target: int) -> float:
        """Part of the rate."""
        return 0.0

    def move_s(self, action: Move, rank: int) -> float:
        """The machine's seconds."""
        return self.machine.move_s(action, rank)

    def rank_class(self, rank: int) -> int:
        """Devices are alike, and links differ by axis only."""
        return 0


def _kind(action: Collective) -> Kind:
    """Exchanges of passes by direction, others by what they are for."""
    if action.phase:
        return action.axis, "F" if action.phase == "F" else "B"
    return action.axis, action.label.partition(":")[0]


@dataclass(frozen=True, kw_only=True)
class PlayedStep:
    """A step as it is played.

    Attributes:
        program, work: the step.
        stages: names of the units of each stage.
        tensor, context: axes of the policies of these families.
    """

    program: Program
    work: StepWork
    stages: Sequence[Sequence[str]]
    tensor: Collection[str]
    context: Collection[str]


def fitted_cost(
    step: PlayedStep,
    shape: ModelShape,
    plan: TrainingPlans,
    times: StepTimes,
    wires: StepWires,
    machine: CostModel,
) -> FittedCost:
    """Share a price out over a program.

    Args:
        plan: a table of one row; times, wires: its price.
        machine: prices each exchange in proportion to others of its kind.
    """
    priced = PassPrices.of(shape, plan, times, wires)
    table = _Exchanges(step.program, machine)
    count = shape.num_layers * step.work.num_items
    each, factors = priced.each(), dict[Kind, float]()
    if table.has(step.tensor):
        for phase, seconds in priced.tensor_s().items():
            factors |= table.factors(step.tensor, phase, count * seconds)
        each["tensor"] = 0.0
    if table.has(step.context):
        factors |= table.factors(step.context, "FB", count * priced.context_lane_s())
        each["context"] *= priced.is_ring
    factors |= _data_factors(table, priced, {*step.tensor, *step.context})
    updates = [action.flops for action in _computes(step) if _is_update(action)]
    sends = [a.payload_bytes for a in chain(*step.program.lists) if isinstance(a, Send)]
    return FittedCost(
        token_s=_token_seconds(step, plan.method, priced, each),
        update_s=priced.parts["optimizer"],
        once_s=priced.once_s + (0.0 if priced.gathers_always else priced.parts["data"]),
        most_flops=max(updates, default=0.0),
        message_s=priced.message_s(),
        message_bytes=float(np.mean(sends)) if sends else 1.0,
        factors=factors,
        machine=machine,
    )


def _computes(step: PlayedStep) -> Iterator[Compute]:
    return (action for action in chain(*step.program.lists) if isinstance(action, Compute))


def _is_update(action: Compute) -> bool:
    return action.op == "optimizer"


class _Exchanges:
    """The collectives of a program with the machine's own seconds."""

    def __init__(self, program: Program, machine: CostModel) -> None:
        self._total_s: dict[Kind, float] = {}
        self._of_units: list[dict[Kind, dict[str, float]]] = []
        members: dict[str, range] = {}
        for actions in program.lists:
            of_units: dict[Kind, dict[str, float]] = {}
            for action in actions:
                if not isinstance(action, Collective):
                    continue
                if action.axis not in members:
                    members[action.axis] = range(program.mesh.degree(action.axis))
                kind, own_s = _kind(action), machine.collective_s(action, members[action.axis])
                self._total_s[kind] = self._total_s.get(kind, 0.0) + own_s
                of_units.setdefault(kind, {})[action.layer or action.label] = own_s
            self._of_units.append(of_units)

    def has(self, axes: Collection[str]) -> bool:
        """Whether passes exchange something on any of them."""
        return any(axis in axes and what in "FB" for axis, what in self._total_s)

    def kinds(self) -> set[Kind]:
        """Of all lists."""
        return set(self._total_s)

    def factors(self, axes: Collection[str], phases: str, seconds: float) -> dict[Kind, float]:
        """Factors with which all exchanges of passes on these axes take so long, over all lists."""
        kinds = [kind for kind in self._total_s if kind[0] in axes and kind[1] in phases]
        own_s = sum(self._total_s[kind] for kind in kinds)
        return {kind: seconds / own_s for kind in kinds} if own_s else {}

    def once_s(self, kinds: Collection[Kind]) -> float:
        """One exchange of each unit, of the rank that takes longest."""
        totals = [
            sum(sum(of_units.get(kind, {}).values()) for kind in kinds)
            for of_units in self._of_units
        ]
        return max(totals, default=0.0)


def _data_factors(
    table: _Exchanges, priced: PassPrices, others: Collection[str]
) -> dict[Kind, float]:
    """Of weights that are gathered and gradients that are reduced: the price's seconds on the links
    for once, as far as they run beside computing; the program says how often."""
    wires, hidden = priced.wires, priced.data_hidden()
    found: dict[Kind, float] = {}
    for what, seconds in (("gather", wires.gather_s), ("reduce", wires.reduce_s)):
        kinds = [kind for kind in table.kinds() if kind[1] == what and kind[0] not in others]
        own_s = table.once_s(kinds)
        found |= {kind: hidden * float(seconds[0]) / own_s for kind in kinds} if own_s else {}
    return found


def _token_seconds(
    step: PlayedStep, method: str, priced: PassPrices, each: Mapping[str, float]
) -> dict[tuple[str | int, str], float]:
    """Seconds of a token in every module that a compute of the program may name."""
    passes = layer_passes(method, priced.row, each)
    layer_s = {"F": passes.forward_s, "B": passes.backward_s}
    layer_s |= {"W": passes.weight_s, "I": passes.input_s}
    blocks = [block for unit in step.work.units for block in unit.blocks]
    layers = [block for block in blocks if block.op in _LAYER_OPS]
    ends = [block for block in blocks if block.op not in _LAYER_OPS]
    mean = float(np.mean([each.num_tokens for each in _computes(step) if not _is_update(each)]))
    num_layers = len({block.name.rsplit(".", 1)[0] for block in layers})
    # a loss that makes its gradients at once leaves the head no backward pass
    of_ends = sum(block.pass_flops_per_token(phase) for block in ends for phase in "FB") or 1.0
    found: dict[tuple[str | int, str], float] = {}
    for phase in _PHASES:
        of_layer = sum(block.pass_flops_per_token(phase) for block in layers) / num_layers
        flop_s = {True: layer_s[phase] / of_layer / mean, False: priced.head_s / of_ends / mean}
        of_block = {
            block.name: flop_s[block.op in _LAYER_OPS] * block.pass_flops_per_token(phase)
            for block in blocks
        }
        of_unit = {
            unit.name: sum(of_block[block.name] for block in unit.blocks)
            for unit in step.work.units
        }
        found |= {(name, phase): seconds for name, seconds in (of_unit | of_block).items()}
        for stage, units in enumerate(step.stages):
            found[stage, phase] = sum(of_unit[name] for name in units)
    return found
