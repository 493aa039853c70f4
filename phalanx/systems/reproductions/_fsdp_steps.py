"""Training steps under sharded data parallelism, lowered and played in virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from phalanx.action import Compute
from phalanx.cost.base import CostModel
from phalanx.cost.roofline import RooflineCost
from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.hardware.load import Machine
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.policies.data.fsdp import Fsdp
from phalanx.policies.data.replicate import Replicate
from phalanx.policies.pipeline.gpipe import GPipe
from phalanx.policy import Spec
from phalanx.trace import Trace
from phalanx.units import parse_quantity
from phalanx.workload import Block, Module, StepWork, Unit
from phalanx.worlds.sim import SimWorld

BF16_BYTES = 2
# Section 5.1 says "2 Tb/s"; assumption: for each host of 8.
PAPER_HOST_BYTES_PER_S = parse_quantity("2 Tbit/s", "bytes_per_s")


@dataclass(frozen=True)
class Played:
    """One simulated step.

    Attributes:
        trace: rows of one rank of each kind (all ranks are alike here).
        peak_bytes: most bytes of gathered parameters at a time.
    """

    trace: Trace
    peak_bytes: float

    @cached_property
    def _rows(self) -> list[dict]:
        return list(self.trace.where(rank=0).rows())

    def wire_bytes(self, axis: str) -> float:
        """Bytes that a rank sends along an axis."""
        return sum(row["wire_bytes"] for row in self._rows if row["axis"] == axis)

    def num_collectives(self) -> int:
        """Collectives that a rank takes part in."""
        return sum(bool(row["axis"]) for row in self._rows)

    @property
    def end_s(self) -> float:
        """When the step ended."""
        return self.trace.end_s

    @property
    def forward_s(self) -> float:
        """When the last forward compute ended."""
        return max(r["start_s"] + r["dur_s"] for r in self._rows if r["phase"] == "F")

    def start_s(self, label: str) -> float:
        """When the action of that label started; infinite for one that the step does not have."""
        return next((row["start_s"] for row in self._rows if row["action_id"] == label), inf)


def play(work: StepWork, mesh: Mesh, specs: Sequence[Spec], cost: CostModel) -> Played:
    """Lower one step and play it; one rank stands for all that are alike."""
    world = SimWorld(mesh, cost, fold=True)
    program = lower(work, mesh, GPipe(), specs)
    trace = drive(world, program=program)
    return Played(trace, max(world.peak_bytes().values(), default=0.0))


def equal_units(num_layers: int, rows: int, width: int, *, root_rows: int = 0) -> StepWork:
    """Layers of one square-cut matrix each, after a root unit if it has rows; nothing is saved for
    the backward pass, so that the memory of a simulated step is that of gathered parameters."""
    root = [_unit("embed_tokens", "embedding", {"weight": (root_rows, width)})]
    layers = [_unit(f"layers.{at}", "layer", {"weight": (rows, width)}) for at in range(num_layers)]
    units = (root if root_rows else []) + layers
    return StepWork(
        units=tuple(units), item_tokens=(1,), param_bytes=BF16_BYTES, grad_bytes=BF16_BYTES
    )


def whole_numbers() -> TableCost:
    """Prices for counting and order: a layer computes for 2, every collective takes 1."""
    seconds = {"layer.F": 2, "layer.B": 4, "embedding.F": 1, "embedding.B": 1, "optimizer": 1}
    return TableCost(seconds | {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1})


def full_sharding(*, reshard: bool = True, prefetch: int = 1) -> Sequence[Spec]:
    """FSDP over the axis "shard"."""
    return [Fsdp(reshard_after_forward=reshard, prefetch=prefetch)]


def hybrid_sharding() -> Sequence[Spec]:
    """FSDP over "shard" inside a host, replicas over "replicate"."""
    return [Fsdp(), Replicate()]


def replication() -> Sequence[Spec]:
    """Plain data parallelism over the axis "replicate"."""
    return [Replicate()]


# ---- the two models of the paper -----------------------------------------------------------------


def gpt_175b(batch: int) -> StepWork:
    """minGPT-175B of section 5.4: 96 blocks of width 12288, context 2048, vocabulary 50000.

    Attention computes the whole S x S matrix and masks it. Embedding and head belong to the root.
    """
    width, length, vocabulary = 12288, 2048, 50_000
    sizes = {"qkv": (3 * width, width), "o": (width, width)}
    sizes |= {"up": (4 * width, width), "down": (width, 4 * width)}
    table, positions = (vocabulary, width), (length, width)
    embedding = {"tokens": table, "positions": positions}
    layers = [
        _unit(f"layers.{at}", "layer", sizes, extra_flops_per_token=4.0 * length * width)
        for at in range(96)
    ]
    units = [_unit("embed_tokens", "embedding", embedding, flops=False), *layers]
    units.append(_unit("lm_head", "head", {"weight": table}))
    return _bf16_step(units, batch * length)


def t5_11b(batch: int) -> StepWork:
    """T5-11B: 24 encoder and 24 decoder blocks, width 1024, 128 heads of 128, feed-forward 65536.

    512 tokens enter the encoder and 512 the decoder of each sequence (section 5.1).
    """
    width, inner, wide, length = 1024, 128 * 128, 65_536, 512
    attention = {"q": (inner, width), "k": (inner, width), "v": (inner, width), "o": (width, inner)}
    cross = {f"cross_{name}": shape for name, shape in attention.items()}
    mlp = {"up": (wide, width), "down": (width, wide)}
    scores = 4.0 * length * inner
    units = [_unit("embed_tokens", "embedding", {"weight": (32_128, width)}, flops=False)]
    for at in range(24):
        sizes = attention | mlp
        units.append(_unit(f"layers.{at}", "layer", sizes, extra_flops_per_token=scores))
    for at in range(24, 48):
        sizes = attention | cross | mlp
        units.append(_unit(f"layers.{at}", "layer", sizes, extra_flops_per_token=2 * scores))
    return _bf16_step(units, batch * length)


@dataclass(frozen=True, kw_only=True)
class Recomputing(RooflineCost):
    """A roofline whose backward pass repeats the forward pass first (activation checkpointing)."""

    def compute_s(self, action: Compute, rank: int) -> float:
        """A backward pass counts two forward passes; checkpointing makes it three."""
        work_s = super().compute_s(action, rank)
        return work_s * 1.5 if action.phase == "B" else work_s


def on_hosts(machine: Machine, num_ranks: int, flops_per_s: float) -> Recomputing:
    """Rings through hosts: each rank's link carries the ring inside, all network ports of a host
    together carry it across (one ring per port), so the slower of the two sets the pace.

    A step's latency is the mean over the hops of one round: one hop in `devices_per_domain` crosses
    hosts. Network speed is the paper's (section 5.1), links, latencies and memory the machine
    file's.
    """
    spans_hosts = num_ranks > machine.devices_per_domain
    link = machine.link_bandwidth.value
    crossing = 1 / machine.devices_per_domain if spans_hosts else 0.0
    latencies = machine.link_latency.value, machine.network_latency.value
    return Recomputing(
        flops_per_s=flops_per_s,
        memory_bytes_per_s=machine.memory_bandwidth.value,
        link_bytes_per_s=min(link, PAPER_HOST_BYTES_PER_S) if spans_hosts else link,
        latency_s=latencies[0] * (1 - crossing) + latencies[1] * crossing,
    )


def _unit(
    name: str,
    op: str,
    shapes: Mapping[str, tuple[int, int]],
    *,
    extra_flops_per_token: float = 0.0,
    flops: bool = True,
) -> Unit:
    modules = tuple(Module(name, shape) for name, shape in shapes.items())
    products = 2.0 * sum(module.num_params for module in modules) if flops else 0.0
    block = Block(
        name=f"{name}.block",
        op=op,
        modules=modules,
        flops_per_token=products + extra_flops_per_token,
    )
    return Unit(name=name, blocks=(block,))


def _bf16_step(units: Sequence[Unit], num_tokens: int) -> StepWork:
    return StepWork(
        units=tuple(units),
        item_tokens=(num_tokens,),
        param_bytes=BF16_BYTES,
        grad_bytes=BF16_BYTES,
    )
