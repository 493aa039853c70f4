"""A task of SkyPilot that installs and runs the plan's program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.errors import PlanError
from phalanx.planner.emitters.base import Site, Writing, yaml_text
from phalanx.planner.emitters.launch import launch
from phalanx.planner.importers.foreign import ForeignPlan

VERSION = "0.14.1"
FILE = "sky.yaml"
_PORT = 8000
_SAME = "A10G A100 B200 B300 GB200 GH200 H100 H200 L4 L40S MI300X RTX3090 RTX4090".split()
# machine -> accelerator in SkyPilot's catalog
_NAMES = {name.lower(): name for name in _SAME} | {
    "a100-40g": "A100",
    "a100-80g": "A100-80GB",
    "a100-pcie": "A100-80GB",
    "gh200-96g": "GH200",
    "h100-pcie": "H100",
    "v100-32g": "V100-32GB",
    "trainium1": "Trainium",
    "inferentia2": "Inferentia",
}


def write(plan: ForeignPlan, site: Site) -> Mapping[str, str]:
    """The task, and the files of the program that it runs.

    Raises:
        PlanError: `emit/impossible` without an accelerator, and for what no program can run.
    """
    writing = Writing("skypilot", VERSION, plan, role=plan.role)
    rule = "is not stated: name a cluster of GPUs"
    writing.require(bool(site.accelerator), "accelerator", rule, ["8xh100"])
    started = launch(plan, site)
    name = _NAMES.get(site.accelerator.lower(), site.accelerator)
    rule = "is no accelerator by a name of SkyPilot's catalog"
    if name not in _NAMES.values():
        legal = sorted(set(_NAMES.values()))
        raise PlanError("emit/impossible", "skypilot: accelerator", name, rule, legal=legal)
    resources: dict[str, Any] = {"accelerators": f"{name}:{started.per_node}"}
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
