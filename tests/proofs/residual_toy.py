"""The toy of proof c: parameters, a global batch, its gradients in one process, its run in a world.

Legend: S tokens of a micro-batch, D model, F feed-forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.action import Program
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.ops.residual import AdamW, Batch, ResidualStep, residual_backward, residual_forward
from phalanx.policy import Order, Spec, Step
from phalanx.registry import build
from phalanx.trace import Trace
from phalanx.workload import StepWork, toy_work

ITEM_TOKENS = (5, 3, 8)  # no two alike, two of them odd


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is planned; everything else follows."""

    axes: Mapping[str, int]
    specs: Sequence[Spec] = ()
    schedule: str | Order = "1f1b"
    width: int = 6
    num_layers: int = 4
    item_tokens: tuple[int, ...] = ITEM_TOKENS

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.axes)

    @property
    def order(self) -> Order:
        named = isinstance(self.schedule, str)
        return build("pipeline", self.schedule) if named else self.schedule

    @property
    def work(self) -> StepWork:
        """Float64 throughout, one block per layer."""
        return toy_work(
            self.num_layers, self.item_tokens, self.width, itemsize=8, blocks_per_layer=1
        )

    @property
    def program(self) -> Program:
        return lower(self.work, self.mesh, self.order, self.specs)

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas."""
        return self.mesh.degree("replicate") * self.mesh.degree("shard")

    def replica(self, rank: int) -> int:
        """The data-parallel replica of a rank."""
        at = self.mesh.coordinate
        return at(rank, "replicate") * self.mesh.degree("shard") + at(rank, "shard")


@dataclass(frozen=True, kw_only=True)
class Looped(Order):
    """GPipe over stages dealt out round robin, so that a rank holds several."""

    stages_per_rank: int = 2

    def num_stages(self, num_ranks: int) -> int:
        return num_ranks * self.stages_per_rank

    def order(self, num_ranks: int, num_items: int) -> list[list[Step]]:
        lists = []
        for rank in range(num_ranks):
            stages, items = range(rank, self.num_stages(num_ranks), num_ranks), range(num_items)
            forward = [Step(stage, "F", item) for stage in stages for item in items]
            backward = [Step(stage, "B", item) for stage in reversed(stages) for item in items]
            lists.append(forward + backward)
        return lists


class Toy(NamedTuple):
    """Whole parameters and the batches of each replica."""

    parameters: dict[str, Tensor]
    batches: list[list[Batch]]

    @property
    def num_counted(self) -> int:
        """Counted tokens of the global batch."""
        return sum(int(batch.counted_S.sum()) for replica in self.batches for batch in replica)


def make_toy(case: Case) -> Toy:
    """The same on every rank."""
    draw = torch.Generator().manual_seed(11)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    modules = {
        f"{block.name}.{module.name}": module.shape
        for unit in case.work.units
        for block in unit.blocks
        for module in block.modules
    }
    parameters = {name: randn(*shape) * 0.3 for name, shape in modules.items()}
    batches = [
        [
            Batch(randn(n, case.width), randn(n, case.width), torch.rand(n, generator=draw) < 0.7)
            for n in case.item_tokens
        ]
        for _ in range(case.num_replicas)
    ]
    return Toy(parameters, batches)


def make_step(case: Case, toy: Toy) -> ResidualStep:
    """The ops of a case."""
    return ResidualStep(case.work, case.mesh, case.order, case.specs, num_counted=toy.num_counted)


def issue_rows(trace: Trace, rank: int) -> list[tuple]:
    """What ranks must agree on, in order of issue; only the simulator knows what a Free gives."""
    columns = ("step", "item", "phase", "layer", "lane", "axis", "peer", "wire_bytes")
    rows = list(trace.where(rank=rank).rows())
    payloads = [0.0 if row["operator"] == "free" else row["payload_bytes"] for row in rows]
    return [(*(row[c] for c in columns), payload) for row, payload in zip(rows, payloads)]


# ---- one process -------------------------------------------------------------------------------


def forward_whole(parameters: Mapping[str, Tensor], x_SD: Tensor) -> Tensor:
    """All layers, by autograd's own operators."""
    names = list(parameters)
    for up, down in zip(names[::2], names[1::2]):
        x_SD = x_SD + F.linear(F.gelu(F.linear(x_SD, parameters[up])), parameters[down])
    return x_SD


def loss_whole(toy: Toy, parameters: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """Of one micro-batch."""
    error_SD = (forward_whole(parameters, batch.x_SD) - batch.target_SD) * batch.counted_S[:, None]
    return 0.5 * error_SD.square().sum() / toy.num_counted


def plain_gradients(toy: Toy, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Autograd over the whole global batch at once, in one graph."""
    leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    losses = [loss_whole(toy, leaves, batch) for replica in toy.batches for batch in replica]
    grads = torch.autograd.grad(sum(losses), list(leaves.values()))
    return dict(zip(leaves, grads))


def plain_training(toy: Toy, num_steps: int) -> dict[str, Tensor]:
    """Parameters after AdamW steps on whole tensors."""
    adamw, parameters = AdamW(), {name: p.clone() for name, p in toy.parameters.items()}
    states = {name: torch.zeros(2, p.numel(), dtype=p.dtype) for name, p in parameters.items()}
    for step in range(1, num_steps + 1):
        grads = plain_gradients(toy, parameters)
        for name, parameter in parameters.items():
            adamw.apply(parameter.view(-1), grads[name].reshape(-1), states[name], step)
    return parameters


def worst_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest difference of any element, by the largest element of all."""
    assert found.keys() == expected.keys()
    scale = max(float(value.abs().max()) for value in expected.values())
    return max(float((found[n] - expected[n]).abs().max()) for n in expected) / scale


# ---- the same sums in the same order -------------------------------------------------------------


def ordered_gradients(case: Case, toy: Toy) -> dict[str, Tensor]:
    """One process that adds in the order of the plan, so that not one bit may differ.

    Parts of a sum come in group order: over tp in every exchange of activations, then over
    micro-batches, then over shards, then over replicas.
    """
    degree, num_shards = case.mesh.degree("tp"), case.mesh.degree("shard")
    split = {n: split_parameter(p, n, degree) for n, p in toy.parameters.items()}
    pads = any(getattr(spec, "sequence_parallel", False) for spec in case.specs)
    of_replica = [
        _accumulate(_item_gradients(toy, split, degree, pads, batch) for batch in batches)
        for batches in toy.batches
    ]
    over_shards = [
        _accumulate(of_replica[first : first + num_shards])
        for first in range(0, case.num_replicas, num_shards)
    ]
    total = _accumulate(over_shards)
    return {
        name: torch.cat(parts, _split_dim(name)).narrow(
            _split_dim(name), 0, toy.parameters[name].shape[_split_dim(name)]
        )
        for name, parts in total.items()
    }


def split_parameter(parameter: Tensor, name: str, degree: int) -> list[Tensor]:
    """Equal parts, the last ones padded with zeros; `up` by rows, `down` by columns."""
    dim = _split_dim(name)
    missing = -parameter.shape[dim] % degree
    shape = list(parameter.shape)
    shape[dim] = missing
    return list(torch.cat([parameter, parameter.new_zeros(shape)], dim).chunk(degree, dim))


def _split_dim(name: str) -> int:
    return 0 if name.endswith("up_proj") else 1


def _item_gradients(
    toy: Toy, split: Mapping[str, list[Tensor]], degree: int, pads: bool, batch: Batch
) -> dict[str, list[Tensor]]:
    missing = -len(batch.x_SD) % degree if pads else 0
    x_SD, target_SD = (F.pad(t, (0, 0, 0, missing)) for t in (batch.x_SD, batch.target_SD))
    counted_S1 = F.pad(batch.counted_S, (0, missing))[:, None]
    rows = -(-len(x_SD) // degree)
    own = [slice(rows * at, rows * (at + 1)) for at in range(degree)]
    names = list(split)
    saved = []
    for up, down in zip(names[::2], names[1::2]):
        outputs = [residual_forward(x_SD, u, d) for u, d in zip(split[up], split[down])]
        saved.append((up, down, x_SD, [z_SF for _, z_SF in outputs]))
        x_SD = _sum_with_residual([y_SD for y_SD, _ in outputs], x_SD, own)
    grad_SD = (x_SD - target_SD) * counted_S1 / toy.num_counted
    found: dict[str, list[Tensor]] = {}
    for up, down, kept_SD, z_parts in reversed(saved):
        weights = zip(z_parts, split[up], split[down])
        parts = [residual_backward(grad_SD, kept_SD, z, u, d) for z, u, d in weights]
        grad_SD = _sum_with_residual([part[0] for part in parts], grad_SD, own)
        found[up], found[down] = [part[1] for part in parts], [part[2] for part in parts]
    return {name: found[name] for name in names}


def _sum_with_residual(parts: list[Tensor], x_SD: Tensor, own: list[slice]) -> Tensor:
    for part, rows in zip(parts, own):
        part[rows] += x_SD[rows]
    return _sum(parts)


def _sum(parts: Iterable[Tensor]) -> Tensor:
    first, *rest = parts
    total = first.clone()
    for part in rest:
        total += part
    return total


def _accumulate(grads: Iterable[Mapping[str, list[Tensor]]]) -> dict[str, list[Tensor]]:
    every = list(grads)
    return {name: [_sum(parts) for parts in zip(*(g[name] for g in every))] for name in every[0]}
