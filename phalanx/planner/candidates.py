"""The plans that a cluster admits for a training job, and why others cannot exist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from phalanx.layout.placement import divisors
from phalanx.layout.tensor_split import tensor_legality
from phalanx.mesh import Mesh
from phalanx.models.config import DecoderConfig
from phalanx.policy import Spec
from phalanx.registry import build

RECOMPUTE = ("none", "selective", "full")
_MOST_TENSOR = 64  # no published plan cuts a product further
_LONGEST_ROW = 65_536
# of layouts that cannot exist: "so many ..."
NO_CUT = "cut heads or widths into uneven parts"
NO_CAST = "keep float32 weights that nothing casts"
NO_WORK = "leave a data rank without a document"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a training role lies on the devices of a cluster.

    Attributes:
        replicate, shard, tensor: sizes of the axes, outermost first.
        keeps_gathered: sharded weights stay gathered from the forward to the backward pass.
        splits_tokens: tokens between blocks are split over the tensor axis as well.
        reduces_always: gradients are scattered after every micro-batch, not kept until the last.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    is_sharded: bool = False
    keeps_gathered: bool = False
    splits_tokens: bool = False
    reduces_always: bool = False

    @property
    def num_data_ranks(self) -> int:
        """Ranks that compute different rows."""
        return self.replicate * self.shard

    @property
    def mesh(self) -> Mesh:
        """Axes that some policy uses, outermost first."""
        sizes = {"replicate": self.replicate, "shard": self.shard, "tp": self.tensor}
        used = {"replicate": self.replicate > 1 or not self.is_sharded, "shard": self.is_sharded}
        return Mesh({name: n for name, n in sizes.items() if used.get(name, n > 1)})

    def tables(self) -> list[dict[str, Any]]:
        """The specs as a plan writes them."""
        tables: list[dict[str, Any]] = []
        if self.is_sharded:
            fsdp = {"reshard_after_forward": not self.keeps_gathered}
            fsdp |= {"reduce_every_item": True} if self.reduces_always else {}
            tables.append({"family": "data", "name": "fsdp"} | fsdp)
        if self.replicate > 1 or not self.is_sharded:
            tables.append({"family": "data", "name": "replicate"})
        if self.tensor > 1:
            options = {"sequence_parallel": True, "gather_twice": False}
            tables.append(
                {"family": "tensor", "name": "megatron"} | (options if self.splits_tokens else {})
            )
        return tables

    @cached_property
    def specs(self) -> tuple[Spec, ...]:
        """The specs, built."""
        return tuple(
            build(str(table["family"]), {k: v for k, v in table.items() if k != "family"})
            for table in self.tables()
        )

    def describe(self) -> str:
        """In a few words."""
        parts = []
        if self.replicate > 1:
            parts.append(f"{self.replicate} replicas")
        if self.shard > 1:
            kept = ", kept gathered" if self.keeps_gathered else ""
            every = ", reducing every micro-batch" if self.reduces_always else ""
            parts.append(f"FSDP over {self.shard}{kept}{every}")
        if self.tensor > 1:
            kind = "tensor + sequence" if self.splits_tokens else "tensor"
            parts.append(f"{kind} parallel over {self.tensor}")
        return "; ".join(parts) or "one device"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One plan.

    Attributes:
        row_tokens: tokens of a packed row, i.e. of a micro-batch.
    """

    layout: Layout
    recompute: str
    row_tokens: int

    def describe(self) -> str:
        """In a line."""
        rows = f"rows of {self.row_tokens:,} tokens"
        again = "" if self.recompute == "none" else f"; {self.recompute} recomputation"
        return f"{self.layout.describe()}; {rows}{again}"


@dataclass(frozen=True)
class Choice:
    """Values that a job leaves open, or has fixed.

    Attributes:
        mesh: axis sizes that the job names for this many devices; {}: open.
        recompute, row_tokens: values to try.
    """

    recompute: Sequence[str] = RECOMPUTE
    row_tokens: int = 0
    mesh: Mapping[str, int] | None = None


def layouts(
    config: DecoderConfig,
    num_devices: int,
    devices_per_domain: int,
    *,
    casts: bool,
    trains_all: bool,
    most_data_ranks: int,
    illegal: Counter[str],
    mesh: Mapping[str, int] | None = None,
) -> Iterator[Layout]:
    """Legal layouts; others are counted by reason.

    Args:
        casts: what is trained is kept in another dtype than computes, so something has to shard.
        trains_all: gradients are as large as the model, so it matters when they are reduced.
        most_data_ranks: documents of a batch.
        illegal: reason -> layouts, added to.
        mesh: sizes of "replicate", "shard" and "tp" to keep to.
    """
    for tensor in divisors(num_devices):
        if tensor > _MOST_TENSOR or (mesh and tensor != mesh.get("tp", 1)):
            continue
        found = [
            each
            for each in _data_layouts(
                num_devices // tensor, max(1, devices_per_domain // tensor), trains_all
            )
            if (casts or each.shard > 1 or not each.is_sharded)  # else it would shard nothing
            and (not mesh or all(getattr(each, axis) == mesh.get(axis, 1) for axis in _DATA))
        ]
        is_legal = not tensor_legality(config, tensor).illegal
        for data in found:
            for splits in (False, True)[: 1 + (tensor > 1)]:
                reason = ""
                if not is_legal:
                    reason = NO_CUT
                elif data.num_data_ranks > most_data_ranks:
                    reason = NO_WORK
                elif casts and not data.is_sharded:
                    reason = NO_CAST
                if reason:
                    illegal[reason] += 1
                    continue
                yield replace(data, tensor=tensor, splits_tokens=splits)


_DATA = ("replicate", "shard")


def _data_layouts(num_ranks: int, per_domain: int, trains_all: bool) -> list[Layout]:
    """Replicas; shards over all ranks; shards inside a domain with replicas across domains."""
    found = [Layout(replicate=num_ranks)]
    shards = [num_ranks]
    if 1 < per_domain < num_ranks and num_ranks % per_domain == 0:
        shards.append(per_domain)
    for shard in shards:
        one = Layout(replicate=num_ranks // shard, shard=shard, is_sharded=True)
        for kept in (False, True):
            for always in (False, True)[: 1 + (trains_all and shard > 1)]:
                found.append(replace(one, keeps_gathered=kept, reduces_always=always))
    return found


def row_choices(least: int, tokens_of_rank: float, fixed: int = 0) -> list[int]:
    """Row lengths to try: the shortest that holds every document, doubled up to a rank's share.

    Args:
        least: what holds the longest document.
        tokens_of_rank: of a batch.
        fixed: what the job names.
    """
    if fixed:
        return [fixed]
    found = [least]
    while found[-1] < min(tokens_of_rank, _LONGEST_ROW):
        found.append(2 * found[-1])
    return found


def fixed_mesh(mesh: Mapping[str, int], num_devices: int) -> Mapping[str, int] | None:
    """The job's mesh, if it is one of the axes searched here and fits the cluster."""
    is_searched = set(mesh) <= {*_DATA, "tp"}
    return mesh if mesh and is_searched and prod(mesh.values()) == num_devices else None
