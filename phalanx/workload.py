"""What a training step has to compute, in numbers: blocks, units, micro-batches.

A `Block` is the smallest thing that a Spec wraps (attention, mlp); a `Unit` is what FSDP gathers
and pipelines cut between (a decoder layer, the embedding, the head). Built from a model's operator
list (`models.spec`) or from toy numbers in a job file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from phalanx.errors import PlanError


class Module(NamedTuple):
    """A parameter's module within a block: name ("up_proj") and shape of its weight."""

    name: str
    shape: tuple[int, ...]

    @property
    def num_params(self) -> int:
        """Elements."""
        return prod(self.shape)


class Heads(NamedTuple):
    """Of an attention block.

    Attributes:
        query, key_value: heads.
        head_bytes: of a token in one of them.
        window: keys that a query sees, its own included; None: all earlier ones.
    """

    query: int
    key_value: int
    head_bytes: float
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The smallest thing that a Spec wraps.

    Attributes:
        name: canonical module prefix ("layers.3.mlp").
        op: key of the cost model ("attention", "mlp", "embedding", "head").
        modules: what holds parameters, in forward order; rules match "<block>.<module>".
        flops_per_token: forward.
        backward_flops_per_token: None: twice as many; adapters on a frozen base take fewer.
        saved_bytes_per_token: activations kept for the backward pass.
        out_bytes_per_token: what leaves the block (hidden width x itemsize).
        heads: of attention: what ranks exchange that share a sequence; None: not attention.
    """

    name: str
    op: str
    modules: tuple[Module, ...] = ()
    flops_per_token: float = 0.0
    backward_flops_per_token: float | None = None
    saved_bytes_per_token: float = 0.0
    out_bytes_per_token: float = 0.0
    heads: Heads | None = None

    @property
    def num_params(self) -> int:
        """Elements, unsharded."""
        return sum(module.num_params for module in self.modules)

    def pass_flops_per_token(self, kind: str) -> float:
        """Work of a pass: "F", "B", or half of it for "I" and "W" (a product per weight each)."""
        if kind == "F":
            return self.flops_per_token
        whole = self.backward_flops_per_token
        whole = 2.0 * self.flops_per_token if whole is None else whole
        return whole if kind == "B" else whole / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A group of blocks that is gathered, freed and placed on a stage together."""

    name: str
    blocks: tuple[Block, ...]
    trainable_params: int | None = None  # None: all; LoRA trains fewer than it gathers

    @property
    def num_params(self) -> int:
        """Elements of all blocks."""
        return sum(block.num_params for block in self.blocks)

    @property
    def num_trainable(self) -> int:
        """Elements that get a gradient."""
        return self.num_params if self.trainable_params is None else self.trainable_params

    @property
    def out_bytes_per_token(self) -> float:
        """What the next unit receives."""
        return self.blocks[-1].out_bytes_per_token

    @property
    def flops_per_token(self) -> float:
        """Forward work."""
        return sum(block.flops_per_token for block in self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """One training step of one data-parallel replica.

    Attributes:
        units: in forward order.
        item_tokens: tokens of each micro-batch; they may differ.
        param_bytes, grad_bytes: per element in compute and in reduction.
    """

    units: tuple[Unit, ...]
    item_tokens: tuple[int, ...]
    param_bytes: int = 4
    grad_bytes: int = 4

    @property
    def num_items(self) -> int:
        """Micro-batches."""
        return len(self.item_tokens)


def split_units(
    units: Sequence[Unit], num_stages: int, extra_layers: tuple[float, float] = (0.0, 0.0)
) -> list[tuple[Unit, ...]]:
    """Cut units into consecutive stages of nearly equal forward work.

    Args:
        units: in forward order.
        num_stages: how many parts; every part gets at least one unit.
        extra_layers: cost of the first and the last stage's extras (embedding, head) in layers,
            for unit lists that do not contain them.

    Raises:
        PlanError: `order/illegal` when there are fewer units than stages.
    """
    if num_stages > len(units):
        rule = f"{num_stages} stages need at least as many units; the model has {len(units)}"
        raise PlanError("order/illegal", "num_stages", num_stages, rule, legal=[len(units)])
    work = [max(unit.flops_per_token, 1e-12) for unit in units]
    mean = sum(work) / len(work)
    work[0] += extra_layers[0] * mean
    work[-1] += extra_layers[1] * mean
    before = [0.0, *accumulate(work)]
    cuts = [0]
    for stage in range(1, num_stages):
        goal = before[-1] * stage / num_stages
        low, high = cuts[-1] + 1, len(units) - (num_stages - stage)
        cuts.append(min(range(low, high + 1), key=lambda at: abs(before[at] - goal)))
    cuts.append(len(units))
    return [tuple(units[a:b]) for a, b in pairwise(cuts)]


def toy_work(
    num_layers: int,
    item_tokens: Sequence[int],
    width: int = 8,
    itemsize: int = 4,
    blocks_per_layer: int = 2,
) -> StepWork:
    """Equal layers of residual two-matrix blocks (D -> 4D -> D): simulation and real tensors alike.

    Args:
        num_layers: units.
        item_tokens: tokens of each micro-batch.
        width: hidden size D.
        itemsize: bytes per element of parameters, gradients and activations.
        blocks_per_layer: two-matrix blocks in a layer.
    """
    modules = (Module("up_proj", (4 * width, width)), Module("down_proj", (width, 4 * width)))
    units = []
    for layer in range(num_layers):
        blocks = tuple(
            Block(
                name=f"layers.{layer}.{index}.mlp",
                op="mlp",
                modules=modules,
                flops_per_token=2.0 * sum(module.num_params for module in modules),
                saved_bytes_per_token=float(itemsize * 5 * width),
                out_bytes_per_token=float(itemsize * width),
            )
            for index in range(blocks_per_layer)
        )
        units.append(Unit(name=f"layers.{layer}", blocks=blocks))
    tokens = tuple(item_tokens)
    return StepWork(
        units=tuple(units), item_tokens=tokens, param_bytes=itemsize, grad_bytes=itemsize
    )
