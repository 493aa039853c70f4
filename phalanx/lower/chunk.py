"""What the passes share: the chunks of a list, and where units and their parameters lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, prod

from phalanx.action import Action, Compute
from phalanx.layout.tensor_split import kv_heads_of
from phalanx.mesh import Mesh
from phalanx.policy import Spec, Step
from phalanx.workload import Block, Heads, Module, StepWork, Unit

# Words of the binder that cut a module's weight for good over a model axis (Rule.dim says where).
SPLIT_PLACEMENTS = ("column", "row", "vocab")
# The word for a weight that every rank holds whole and uses on its part of the tokens or heads.
PARTIAL_PLACEMENT = "partial"
_FORWARD = ("F", "activations")


@dataclass
class Chunk:
    """One step of the order with all that belongs to it, in list order.

    Attributes:
        step: which stage, kind and micro-batch.
        actions: computes at first; passes weave their actions around them.
        units: names of the units that the step computes, in the order of its computes.
        beside: label of a compute -> the exchanges that run while it does, which must have ended
            before its output is used.
    """

    step: Step
    actions: list[Action]
    units: tuple[str, ...]
    beside: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def computes(self) -> list[tuple[int, Compute]]:
        """Position and action of each compute."""
        return [(at, a) for at, a in enumerate(self.actions) if isinstance(a, Compute)]

    def first_on_activations(self) -> int:
        """Position of the first action that needs the step's input."""
        return next(at for at, a in enumerate(self.actions) if a.phase == self.step.kind)

    def last_on_activations(self) -> Action:
        """The action whose end makes the step's output complete."""
        return [a for a in self.actions if a.phase == self.step.kind and a.stage >= 0][-1]

    def last_label(self) -> str:
        """Its label."""
        return self.last_on_activations().label

    def wait(self, at: int, *labels: str) -> None:
        """Let the action at this position wait for more labels."""
        action = self.actions[at]
        self.actions[at] = replace(action, after=(*action.after, *labels))


@dataclass
class Placed:
    """Stages with their units, and how much of each parameter a rank holds.

    Attributes:
        work: sizes of elements and micro-batches.
        stages: units of each stage.
        mesh: the devices.
        unit_of: unit by name.
        shapes: unit -> weight shapes that one rank holds once model axes have cut them.
        heads: attention block -> the heads that one rank computes, likewise.
        token_parts: parts that the tokens between blocks are split into (sequence parallelism).
        reduced: (unit, item) -> label of its latest gradient reduction, for the next data axis.
        sharded: unit -> degree over which data axes have cut its gradients so far.
        whole: units whose parameters they have left whole.
    """

    work: StepWork
    stages: Sequence[Sequence[Unit]]
    mesh: Mesh
    unit_of: dict[str, Unit]
    shapes: dict[str, list[tuple[int, ...]]]
    heads: dict[str, Heads]
    token_parts: int = 1
    reduced: dict[tuple[str, int], str] = field(default_factory=dict)
    sharded: dict[str, int] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)

    @staticmethod
    def of(
        work: StepWork, stages: Sequence[Sequence[Unit]], mesh: Mesh, specs: Sequence[Spec]
    ) -> Placed:
        """Cut every module's shape by the specs that split it."""
        cutting = [spec for spec in specs if mesh.degree(spec.axis) > 1]
        shapes: dict[str, list[tuple[int, ...]]] = {}
        for unit in work.units:
            shapes[unit.name] = [
                _local_shape(block, module, cutting, mesh)
                for block in unit.blocks
                for module in block.modules
            ]
        heads = {
            block.name: _local_heads(block, block.heads, cutting, mesh)
            for unit in work.units
            for block in unit.blocks
            if block.heads is not None
        }
        parts = prod(mesh.degree(spec.axis) for spec in cutting if _splits_tokens(spec))
        return Placed(work, stages, mesh, {u.name: u for u in work.units}, shapes, heads, parts)

    def tokens_between(self, item: int) -> int:
        """Tokens of a micro-batch that one rank holds between blocks."""
        return ceil(self.work.item_tokens[item] / self.token_parts)

    def padded_params(self, unit: str, degree: int) -> int:
        """Elements of a unit when each parameter's dim 0 is cut over `degree` ranks and padded to
        equal shards, as FSDP2 communicates it."""
        return sum(padded_size(shape, degree) for shape in self.shapes[unit])

    def padded_gradients(self, unit: str, degree: int) -> int:
        """Elements that get a gradient, padded likewise; adapters count as one flat tensor."""
        trained = self.unit_of[unit].trainable_params
        if trained is None:
            return self.padded_params(unit, degree)
        return ceil(trained / degree) * degree

    def local_params(self, unit: str) -> int:
        """Elements that one rank keeps, after model and data axes have cut."""
        degree = 1 if unit in self.whole else self.sharded.get(unit, 1)
        return self.padded_params(unit, degree) // degree

    def local_trainable(self, unit: str) -> int:
        """Elements of gradient and optimizer state that one rank keeps."""
        degree = self.sharded.get(unit, 1)
        return self.padded_gradients(unit, degree) // degree


def _splits_tokens(spec: Spec) -> bool:
    """Whether its blocks gather their tokens first and scatter them again."""
    for rule in spec.rules():
        seen = {(e.collective, e.at) for e in rule.exchanges if (e.phase, e.of) == _FORWARD}
        if seen >= {("all_gather", "before"), ("reduce_scatter", "after")}:
            return True
    return False


def padded_size(shape: tuple[int, ...], degree: int) -> int:
    """Elements of a tensor whose dim 0 is padded to a multiple of `degree`."""
    rest = 1
    for size in shape[1:]:
        rest *= size
    return ceil(shape[0] / degree) * degree * rest if shape else degree


def _local_shape(
    block: Block, module: Module, specs: Sequence[Spec], mesh: Mesh
) -> tuple[int, ...]:
    shape = list(module.shape)
    for spec in specs:
        rule = spec.rule_for(f"{block.name}.{module.name}")
        if rule is not None and rule.placement in SPLIT_PLACEMENTS:
            shape[rule.dim] = ceil(shape[rule.dim] / mesh.degree(spec.axis))
    return tuple(shape)


def _local_heads(block: Block, heads: Heads, specs: Sequence[Spec], mesh: Mesh) -> Heads:
    """Of one rank, where its query projection is cut by output."""
    rules = ((spec.axis, spec.rule_for(f"{block.name}.q_proj")) for spec in specs)
    degree = prod(
        mesh.degree(axis) for axis, rule in rules if rule and rule.placement in SPLIT_PLACEMENTS
    )
    if degree == 1:
        return heads
    of_rank = kv_heads_of(heads.query, heads.key_value, degree, 0)
    return heads._replace(query=ceil(heads.query / degree), key_value=len(of_rank))
