"""Which plans `phalanx train` runs as they are, and the mesh and policies of one that it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from phalanx.mesh import Mesh
from phalanx.policy import Spec
from phalanx.registry import build


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


def obstacles(
    columns: Mapping[str, np.ndarray], *, casts: bool, has_experts: bool
) -> dict[str, np.ndarray]:
    """What `phalanx train` does not do yet -> which plans ask for it.

    Args:
        columns: of `TrainingPlans`.
        casts: what is trained is kept in another dtype than computes, so something has to shard.
        has_experts: the model is a mixture; its experts are cut like other widths.
    """
    zero, ranks = columns["zero"], columns["data"] * columns["context"]
    cut = columns["expert_tensor"] != columns["tensor"]
    return {
        "pipeline": columns["pipeline"] > 1,
        "context parallelism": columns["context"] > 1,
        "expert parallelism": columns["expert"] > 1,
        "whole experts on tensor ranks": cut if has_experts else np.zeros(cut.shape, dtype=bool),
        "ZeRO 1 or 2": (zero == 1) | (zero == 2),
        "float32 weights on replicas": (zero == 0) & (ranks > 1) & casts,
        "offload": columns["offload"] > 0,
    }


def layout_of(row: Mapping[str, float], *, casts: bool, trains_all: bool) -> Layout:
    """The layout of a plan without obstacles."""
    shard = int(row["shard"])
    is_sharded = row["zero"] == 3 or casts
    return Layout(
        replicate=int(row["data"]) // shard,
        shard=shard,
        tensor=int(row["tensor"]),
        is_sharded=is_sharded,
        keeps_gathered=bool(row["keeps_gathered"]),
        splits_tokens=bool(row["sequence_parallel"]),
        reduces_always=trains_all and shard > 1 and row["num_micro"] > 1,
    )
