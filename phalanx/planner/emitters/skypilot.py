"""A task of SkyPilot that installs and runs the plan's program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.planner.emitters.base import Site, Writing, yaml_text
from phalanx.planner.emitters.launch import launch
from phalanx.planner.importers.foreign import ForeignPlan

VERSION = "0.14.1"
FILE = "sky.yaml"
_PORT = 8000


def write(plan: ForeignPlan, site: Site) -> Mapping[str, str]:
    """The task, and the files of the program that it runs.

    Raises:
        PlanError: `emit/impossible` without an accelerator, and for what no program can run.
    """
    writing = Writing("skypilot", VERSION, plan, role=plan.role)
    rule = "is not stated: name a cluster of GPUs"
    writing.require(bool(site.accelerator), "accelerator", rule, ["8xh100"])
    started = launch(plan, site)
    resources: dict[str, Any] = {"accelerators": f"{site.accelerator}:{started.per_node}"}
    if plan.role == "serve":
        resources["ports"] = _PORT
    table = {
        "name": f"phalanx-{'serve' if plan.role == 'serve' else 'train'}",
        "resources": resources,
        "num_nodes": started.nodes,
        "workdir": ".",
        "setup": started.setup + "\n",
        "run": (
            'export NODE_RANK="$SKYPILOT_NODE_RANK"\n'
            'export MASTER_ADDR="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"\n'
            f"{started.command}\n"
        ),
    }
    writing.lacks(*started.refused)
    writing.lacks("region, disk and spot: SkyPilot chooses, or `sky launch` is told")
    how = f"Start: sky launch {FILE}, in this folder; it runs {started.program}."
    text = yaml_text(table)
    return {FILE: writing.header(how) + text, **started.files}
