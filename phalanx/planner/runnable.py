"""Which plans `phalanx train` runs as they are, and the mesh and policies of one that it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from phalanx.cost.training_plans import CONTEXT_KINDS, SCHEDULES
from phalanx.mesh import Mesh
from phalanx.policy import Spec
from phalanx.registry import build

_CONTEXT_POLICIES = {"all-gather": "all_gather", "ring": "ring", "ulysses": "ulysses"}
_ORDERS = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved": "interleaved",
    "zero-bubble": "zero_bubble",
    "zbv": "zbv",
    "dualpipe-v": "dualpipe_v",
    "hanayo": "hanayo",
}


def order_table(schedule: str, virtual: int) -> dict[str, Any] | None:
    """The order of a schedule as a plan writes it; None for one that no policy lists.

    Args:
        virtual: model chunks of a rank.
    """
    name = _ORDERS.get(schedule)
    if name is None:
        return None
    options = {"interleaved": {"virtual": virtual}, "hanayo": {"waves": virtual // 2}}
    return {"family": "pipeline", "name": name} | options.get(schedule, {})


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a training role lies on the devices of a cluster.

    Attributes:
        replicate, shard, pipeline, context, tensor: sizes of the axes, outermost first. Ranks that
            share rows shard with those of "shard".
        zero: what is sharded, as `TrainingPlans` says.
        keeps_gathered: sharded weights stay gathered from the forward to the backward pass.
        splits_tokens: tokens between blocks are split over the tensor axis as well.
        reduces_always: gradients are scattered after every micro-batch, not kept until the last.
        schedule: the order as a table, None without a pipeline.
        exchange: the context policy.
        offloads: moments and master weights wait outside the device.
    """

    replicate: int = 1
    shard: int = 1
    pipeline: int = 1
    context: int = 1
    tensor: int = 1
    zero: int = 0
    keeps_gathered: bool = False
    splits_tokens: bool = False
    reduces_always: bool = False
    schedule: Mapping[str, Any] | None = None
    exchange: str = ""
    offloads: bool = False

    @property
    def num_data_ranks(self) -> int:
        """Ranks that compute different rows."""
        return self.replicate * self.shard

    @property
    def mesh(self) -> Mesh:
        """Axes that some policy uses, outermost first."""
        sizes = {
            "replicate": self.replicate,
            "shard": self.shard,
            "pp": self.pipeline,
            "cp": self.context,
            "tp": self.tensor,
        }
        used = {"replicate": self.replicate > 1 or not self.zero, "shard": self.zero > 0}
        return Mesh({name: n for name, n in sizes.items() if used.get(name, n > 1)})

    def tables(self) -> list[dict[str, Any]]:
        """The specs as a plan writes them."""
        tables: list[dict[str, Any]] = []
        if self.zero == 3:
            fsdp = {"reshard_after_forward": not self.keeps_gathered}
            fsdp |= {"reduce_every_item": True} if self.reduces_always else {}
            tables.append({"family": "data", "name": "fsdp"} | fsdp)
        elif self.zero:
            tables.append({"family": "data", "name": "zero", "stage": self.zero})
        if self.replicate > 1 or not self.zero:
            tables.append({"family": "data", "name": "replicate"})
        if self.tensor > 1:
            options = {"sequence_parallel": True, "gather_twice": False}
            tables.append(
                {"family": "tensor", "name": "megatron"} | (options if self.splits_tokens else {})
            )
        if self.context > 1:
            tables.append({"family": "context", "name": self.exchange})
        return tables

    @cached_property
    def specs(self) -> tuple[Spec, ...]:
        """The specs, built."""
        return tuple(
            build(str(table["family"]), {k: v for k, v in table.items() if k != "family"})
            for table in self.tables()
        )


def obstacles(
    columns: Mapping[str, np.ndarray], *, casts: bool, has_experts: bool, most_stages: int
) -> dict[str, np.ndarray]:
    """What `phalanx train` does not do yet -> which plans ask for it.

    Args:
        columns: of `TrainingPlans`.
        casts: what is trained is kept in another dtype than computes, so something has to shard.
        has_experts: the model is a mixture; its experts are cut like other widths.
        most_stages: that its layers can be cut into.
    """
    zero, ranks = columns["zero"], columns["data"] * columns["context"]
    is_staged, context = columns["pipeline"] > 1, columns["context"]
    cut = columns["expert_tensor"] != columns["tensor"]
    listed = [at for at, name in enumerate(SCHEDULES) if name in _ORDERS]
    return {
        "this schedule": is_staged & ~np.isin(columns["schedule"], listed),
        "so many stages": is_staged & (columns["pipeline"] * columns["virtual"] > most_stages),
        "expert parallelism": columns["expert"] > 1,
        "whole experts on tensor ranks": cut if has_experts else np.zeros(cut.shape, dtype=bool),
        "float32 weights on replicas": (zero == 0) & (ranks > 1) & casts,
        "shards of fewer ranks than share a row": (zero > 0) & (columns["shard"] % context != 0),
        "a part of the moments in the host": (columns["offload"] > 0) & (columns["offload"] < 1),
    }


def layout_of(row: Mapping[str, float], *, casts: bool, trains_all: bool) -> Layout:
    """The layout of a plan without obstacles."""
    at = {name: int(row[name]) for name in ("data", "context", "pipeline", "shard", "zero")}
    zero = at["zero"]
    if not zero and casts:  # one rank of its kind: what casts its weights cuts nothing
        zero = 1 if at["pipeline"] > 1 else 3
    shard = max(1, at["shard"] // at["context"])
    schedule = order_table(SCHEDULES[int(row["schedule"])], int(row["virtual"]))
    return Layout(
        replicate=at["data"] // shard,
        shard=shard,
        pipeline=at["pipeline"],
        context=at["context"],
        tensor=int(row["tensor"]),
        zero=zero,
        keeps_gathered=bool(row["keeps_gathered"]),
        splits_tokens=bool(row["sequence_parallel"]),
        reduces_always=trains_all and zero == 3 and at["shard"] > 1 and row["num_micro"] > 1,
        schedule=schedule if at["pipeline"] > 1 else None,
        exchange=_CONTEXT_POLICIES[CONTEXT_KINDS[int(row["context_kind"])]]
        if at["context"] > 1
        else "",
        offloads=row["offload"] > 0,
    )
