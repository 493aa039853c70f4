"""A job file of Phalanx itself, for launchers that run `phalanx train`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.cost.training_plans import RECOMPUTE
from phalanx.errors import PlanError
from phalanx.planner.emitters.base import Site, Writing
from phalanx.planner.emitters.toml_text import toml_text
from phalanx.planner.importers.convert import IMPOSSIBLE, job_keys
from phalanx.planner.importers.foreign import ForeignPlan

VERSION = "job files"
FILE = "job.toml"


def write(plan: ForeignPlan, site: Site) -> Mapping[str, str]:
    """The file.

    Raises:
        PlanError: `emit/impossible` for axes that `phalanx train` does not run (pipeline, context,
            expert), a sharding of moments alone, offload, and precisions below bf16.
    """
    writing = Writing("phalanx", VERSION, plan)
    row = writing.row
    for axis in ("pipeline", "context", "expert"):
        writing.require(row[axis] == 1, axis, "`phalanx train` has no such axis yet", [1])
    writing.only("zero", (0, 3))
    writing.only("offload", (0,))
    words = ["bf16", "fp32"]
    rule = "`phalanx train` multiplies in no such precision"
    writing.require(plan.precision in (None, *words), "precision", rule, words)
    writing.require((plan.base_bits or 16) == 16, "base_bits", "frozen weights stay whole", [16])
    for name in ("model", "data"):
        if not getattr(plan, name):
            raise PlanError(IMPOSSIBLE, f"phalanx: {name}", None, "is not stated: name one")
    tables: dict[str, dict[str, Any]] = {"model": {}, "data": {}, "train": {}, "plan": {}}
    for key, value in job_keys(plan).items():
        section, _, name = key.partition(".")
        tables[section][name] = value
    tables["model"]["dtype"] = "float32" if plan.precision == "fp32" else "bfloat16"
    tables["plan"] = {
        "on": "here",
        "mesh": _mesh(writing),
        "data": _data(row),
        "recompute": RECOMPUTE[row["recompute"]],
        "row_tokens": row["row_tokens"] * row["micro_rows"],
    }
    if row["tensor"] > 1:
        tables["plan"]["tensor"] = _tensor(row)
    return {FILE: writing.header(f"Start: phalanx train {FILE}") + "\n" + toml_text(tables)}


def _mesh(writing: Writing) -> dict[str, int]:
    row = writing.row
    sizes = {"replicate": row["replicate"], "shard": row["shard"], "tp": row["tensor"]}
    sizes = {axis: size for axis, size in sizes.items() if size > 1}
    return sizes or {"replicate": 1}


def _data(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    kept = {"name": "fsdp", "reshard_after_forward": not row["keeps_gathered"]}
    sharded = [kept] if row["shard"] > 1 else []
    replicated = [{"name": "replicate"}] if row["replicate"] > 1 or not sharded else []
    return sharded + replicated


def _tensor(row: Mapping[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = {"name": "megatron"}
    if row["sequence_parallel"]:
        table |= {"sequence_parallel": True, "gather_twice": False}
    return table
