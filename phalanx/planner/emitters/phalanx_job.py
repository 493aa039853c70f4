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
from phalanx.planner.runnable import Layout, layout_of

VERSION = "job files"
FILE = "job.toml"


def write(plan: ForeignPlan, site: Site) -> Mapping[str, str]:
    """The file.

    Raises:
        PlanError: `emit/impossible` for what `phalanx train` does not run: expert parallelism,
            weights sharded beside a pipeline, a part of the moments in the host, precisions below
            bf16.
    """
    writing = Writing("phalanx", VERSION, plan)
    row = writing.row
    rule = "`phalanx train` has no such axis yet"
    writing.require(row["expert"] == 1, "expert", rule, [1])
    rule = "gathers weights at every visit of a stage, which `phalanx train` refuses"
    writing.require(row["zero"] < 3 or row["pipeline"] == 1, "zero", rule, [0, 1, 2])
    writing.only("offload", (0, 1))
    words = ["bf16", "fp32"]
    rule = "`phalanx train` multiplies in no such precision"
    writing.require(plan.precision in (None, *words), "precision", rule, words)
    writing.require((plan.base_bits or 16) == 16, "base_bits", "frozen weights stay whole", [16])
    for name in ("model", "data"):
        if not getattr(plan, name):
            raise PlanError(IMPOSSIBLE, f"phalanx: {name}", None, "is not stated: name one")
    tables: dict[str, dict[str, Any]] = {"model": {}, "data": {}, "train": {}, "plan": {}}
    for key, value in _keys(plan).items():
        section, _, name = key.partition(".")
        tables[section][name] = value
    tables["plan"] = {
        "on": "here",
        **_layout(layout_of(row, casts=False, trains_all=False)),
        "recompute": RECOMPUTE[row["recompute"]],
        "row_tokens": row["row_tokens"] * row["micro_rows"],
    }
    return {FILE: writing.header(f"Start: phalanx train {FILE}") + "\n" + toml_text(tables)}


def _keys(plan: ForeignPlan) -> dict[str, Any]:
    """Of all sections but [plan]: the job's own, where the plan was made for one, so that another
    layout trains the same; else what the plan says."""
    keys = {"model.dtype": "float32" if plan.precision == "fp32" else "bfloat16"} | job_keys(plan)
    if plan.own_keys:
        keys.pop("data.max_tokens", None)  # of a row, which holds many documents
    return keys | dict(plan.own_keys)


def _layout(layout: Layout) -> dict[str, Any]:
    """Mesh and policies as keys of [plan]."""
    by_family: dict[str, list[dict[str, Any]]] = {"data": []}
    for table in (*layout.tables(), *([layout.schedule] if layout.schedule else [])):
        options = {name: value for name, value in table.items() if name != "family"}
        by_family.setdefault(str(table["family"]), []).append(options)
    keys = {name: tables if name == "data" else tables[0] for name, tables in by_family.items()}
    return {"mesh": layout.mesh.to_dict()} | keys | ({"offload": "host"} if layout.offloads else {})
