"""Parameters cut over the ranks of a model axis, and put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.mesh import Mesh
from phalanx.policy import Rule, Spec
from phalanx.workload import StepWork


@dataclass(frozen=True)
class TensorCut:
    """How a tensor spec cuts parameters: equal parts of a dim, the last ones padded with zeros.

    Attributes:
        axis, degree: along which, into how many.
        rules: parameter -> its rule.
        shapes: parameter -> shape of the whole.
        gathers_input_twice: what a block keeps of its input is gathered for the backward pass.
    """

    mesh: Mesh
    axis: str
    degree: int
    rules: Mapping[str, Rule]
    shapes: Mapping[str, tuple[int, ...]]
    gathers_input_twice: bool

    @staticmethod
    def of(work: StepWork, mesh: Mesh, specs: Sequence[Spec]) -> TensorCut:
        """Of the spec that splits the products ("tp" of degree 1 without one)."""
        blocks = [block for unit in work.units for block in unit.blocks]
        shapes = {f"{b.name}.{m.name}": m.shape for b in blocks for m in b.modules}
        for spec in specs:
            rules = {name: spec.rule_for(name) for name in shapes}
            if all(rule and rule.placement in ("column", "row") for rule in rules.values()):
                around, degree = spec.rule_for(blocks[0].name), mesh.degree(spec.axis)
                twice = degree > 1 and any(e.of == "inputs" for e in around.exchanges)
                return TensorCut(mesh, spec.axis, degree, rules, shapes, twice)
        return TensorCut(mesh, "tp", 1, {}, shapes, False)

    def part(self, whole: Tensor, name: str, rank: int) -> Tensor:
        """What a rank holds of a parameter."""
        if self.degree == 1:
            return whole
        dim = self.rules[name].dim
        size = ceil(whole.shape[dim] / self.degree)
        padding = [0, 0] * (whole.ndim - dim - 1) + [0, size * self.degree - whole.shape[dim]]
        at = self.mesh.coordinate(rank, self.axis)
        return F.pad(whole, padding).narrow(dim, at * size, size)

    def join(self, parts: Sequence[Tensor], name: str) -> Tensor:
        """The parameter from its parts."""
        if self.degree == 1:
            return parts[0]
        dim = self.rules[name].dim
        return torch.cat(list(parts), dim).narrow(dim, 0, self.shapes[name][dim])
