"""Every legal plan of a training job on so many devices, as a table.

Degrees multiply to the devices: tensor inside context inside pipeline inside data (DOI
10.1145/3695053.3731410, section 4). What changes nothing is listed once (a schedule without a
pipeline). What is never better is not listed: tokens that tensor ranks do not split beside a
pipeline or context ranks (the same traffic, more memory: arXiv 2205.05198, section 4.2); whole
moments beside a pipeline, and whole gradients where all its forwards come first; all forwards
first, where there are micro-batches enough to take turns (the same bubble, more memory: arXiv
2104.04473, section 2.2); optimizer states kept whole where adapters have next to none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from phalanx.cost.training_plans import CONTEXT_KINDS, SCHEDULES
from phalanx.layout.placement import divisors
from phalanx.planner.columns import Options, Table
from phalanx.planner.legality import (
    Sizes,
    axis_rules,
    context_rules,
    expert_rules,
    round_rules,
    stage_rules,
    token_rules,
)

_MOST_STAGES = 512
_VIRTUAL = (2, 3, 4, 6, 8, 12)
_IN_WAVES = (2, 4, 8)  # chunks of a rank: one, two and four waves
_STATES = {"zero": (0, 1, 2, 3, 3), "keeps_gathered": (0, 0, 0, 0, 1)}


def list_layouts(
    sizes: Sizes,
    num_devices: int,
    *,
    trains_all: bool,
    illegal: Counter[str],
    mesh: Mapping[str, int] | None = None,
) -> Table:
    """Plans without their micro-batches: degrees, schedule, what is sharded.

    Args:
        trains_all: all weights are trained, so gradients and moments weigh as much as they.
        illegal: reason -> layouts, added to.
        mesh: sizes of "replicate", "shard", "pp", "cp" and "tp" to keep to.
    """
    table = _axes(num_devices)
    if mesh:
        table = table.keep(_like(table, mesh))
    table = table.obey(illegal, axis_rules(sizes, table))
    table = _split_tokens(table, sizes, illegal)
    table = _split_rows(table, sizes, illegal)
    table = _spread_experts(table, sizes, illegal)
    table = _stages(table, sizes, illegal)
    near = (
        mesh.get("shard", 1) * mesh.get("cp", 1)
        if mesh
        else np.maximum(1, sizes.domain // table["tensor"])
    )
    table = _states(table.joined(near=near + 0 * table["tensor"]), trains_all=trains_all)
    return table.keep(_states_like(table, mesh)) if mesh else table


def num_plans(layouts: Table, rows_of: Callable[[int], Options], recompute: Sequence[int]) -> int:
    """Rows that `with_rows` makes before its rules."""
    values, counts = np.unique(layouts["data"], return_counts=True)
    ways = [len(rows_of(int(value))["row_tokens"]) for value in values]
    return int(counts @ np.array(ways, dtype=int)) * len(recompute) if ways else 0


def with_rows(
    layouts: Table,
    rows_of: Callable[[int], Options],
    *,
    recompute: Sequence[int],
    illegal: Counter[str],
) -> Table:
    """Layouts with their micro-batches and recomputation: columns of `cost.training_plans`.

    Args:
        rows_of: data ranks -> ways to fill micro-batches: columns "row_tokens", "micro_rows",
            "num_micro" and others.
        recompute: indices to try.
        illegal: reason -> layouts with their rows, added to.
    """
    table = layouts.cross_by("data", rows_of) if len(layouts) else layouts.cross(rows_of(1))
    table = table.obey(illegal, round_rules(table))
    takes_turns = table["num_micro"] >= table["pipeline"]
    is_late = (table["schedule"] == SCHEDULES.index("gpipe")) & takes_turns
    return table.keep(~is_late).cross({"recompute": recompute})


def _axes(num_devices: int) -> Table:
    """Degrees of all four axes."""
    found = np.array(divisors(num_devices))
    table = Table({"tensor": found[found <= num_devices]})
    table = table.cross({"pipeline": found[found <= _MOST_STAGES]})
    table = table.keep(num_devices % (table["tensor"] * table["pipeline"]) == 0)
    table = table.cross({"context": found})
    inside = table["tensor"] * table["pipeline"] * table["context"]
    table = table.keep(num_devices % inside == 0)
    inside = table["tensor"] * table["pipeline"] * table["context"]
    return table.joined(data=num_devices // inside)


def _like(table: Table, mesh: Mapping[str, int]) -> np.ndarray:
    """Plans of a mesh that the job names."""
    ranks = mesh.get("replicate", 1) * mesh.get("shard", 1)
    same = (table["tensor"] == mesh.get("tp", 1)) & (table["data"] == ranks)
    same &= table["pipeline"] == mesh.get("pp", 1)
    return same & (table["context"] == mesh.get("cp", 1))


def _states_like(table: Table, mesh: Mapping[str, int]) -> np.ndarray:
    """The same once states are laid out: what an axis "shard" holds, it shards, with the ranks that
    share its rows; weights too, unless a pipeline stands beside it."""
    shard = mesh.get("shard", 1)
    if shard == 1:
        return (table["zero"] == 0) | (table["shard"] == table["context"])
    weights = (table["zero"] == 3) | (table["pipeline"] > 1)
    return weights & (table["shard"] == shard * table["context"])


def _split_tokens(table: Table, sizes: Sizes, illegal: Counter[str]) -> Table:
    table = table.cross({"sequence_parallel": (0, 1)})
    many = (table["pipeline"] > 1) | (table["context"] > 1)
    splits = table["sequence_parallel"] == 1
    alone = table["tensor"] == 1
    table = table.keep(np.where(alone, ~splits, splits | ~many))
    return table.obey(illegal, token_rules(sizes, table))


def _split_rows(table: Table, sizes: Sizes, illegal: Counter[str]) -> Table:
    table = table.cross({"context_kind": range(len(CONTEXT_KINDS))})
    table = table.keep((table["context"] > 1) | (table["context_kind"] == 0))
    return table.obey(illegal, context_rules(sizes, table))


def _spread_experts(table: Table, sizes: Sizes, illegal: Counter[str]) -> Table:
    if not sizes.experts:
        one = np.ones(len(table), dtype=int)
        return table.joined(expert=one, expert_tensor=one)
    table = table.cross({"expert": divisors(max(sizes.experts))})
    table = table.cross({"is_cut": (0, 1)})
    table = table.keep((table["is_cut"] == 0) | (table["tensor"] > 1))
    cut = np.where(table["is_cut"] == 1, table["tensor"], 1)
    table = table.without("is_cut").joined(expert_tensor=cut)
    return table.obey(illegal, expert_rules(sizes, table))


def _states(table: Table, *, trains_all: bool) -> Table:
    """Replicas; moments, gradients or weights sharded over all ranks that hold the same, or weights
    over `near` of them with replicas of these groups."""
    table = table.cross(_STATES).cross({"is_near": (0, 1)})
    zero, is_near, near = table["zero"], table["is_near"] == 1, table["near"]
    ranks = table["data"] * table["context"]
    is_hybrid = (1 < near) & (near < ranks) & (ranks % near == 0) & (zero == 3)
    kept = np.where(zero == 0, ~is_near, ranks > 1) & (~is_near | is_hybrid)
    if not trains_all:
        kept &= (zero == 0) | (zero == 3)
    all_first = table["schedule"] == SCHEDULES.index("gpipe")
    shards = (ranks > 1) & trains_all
    in_pipeline = np.where(shards, (zero == 2) | ((zero == 1) & ~all_first), zero == 0)
    kept &= (table["pipeline"] == 1) | in_pipeline
    shard = np.where(zero == 0, 1, np.where(is_near, near, ranks))
    return table.without("is_near", "near").joined(shard=shard).keep(kept)


def _stages(table: Table, sizes: Sizes, illegal: Counter[str]) -> Table:
    folded = dict.fromkeys(("zbv", "dualpipe", "dualpipe-v"), (2,))
    chunks = {"interleaved": _VIRTUAL, "hanayo": _IN_WAVES} | folded
    pairs = [(at, n) for at, name in enumerate(SCHEDULES) for n in chunks.get(name, (1,))]
    options = {"schedule": [at for at, _ in pairs], "virtual": [n for _, n in pairs]}
    table = table.cross(options)
    plain = (table["schedule"] == SCHEDULES.index("1f1b")) & (table["virtual"] == 1)
    table = table.keep((table["pipeline"] > 1) | plain)
    return table.obey(illegal, stage_rules(sizes, table))
