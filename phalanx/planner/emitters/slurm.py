"""A batch script of Slurm that runs the plan's program, one task to a node."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.planner.emitters.base import Site, Writing
from phalanx.planner.emitters.launch import launch
from phalanx.planner.importers.foreign import ForeignPlan

VERSION = "24.05"
FILE = "job.sbatch"


def write(plan: ForeignPlan, site: Site) -> Mapping[str, str]:
    """The script, and the files of the program that it runs.

    Raises:
        PlanError: `emit/impossible` for what no program can run.
    """
    writing = Writing("slurm", VERSION, plan, role=plan.role)
    started = launch(plan, site)
    writing.lacks(*started.refused)
    writing.lacks("partition, account and time limit: add them, or give them to sbatch")
    if started.program != "phalanx" or plan.role == "serve":
        writing.lacks(f"the program itself, on every node: {started.setup}")
    settings = {
        "job-name": f"phalanx-{plan.role}",
        "nodes": started.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": started.per_node,
        "output": "%x-%j.log",
    }
    lines = "".join(f"#SBATCH --{name}={value}\n" for name, value in settings.items())
    how = f"Start: sbatch {FILE}, in this folder; it runs {started.program}."
    body = (
        "set -euo pipefail\n"
        'MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"\n'
        "export MASTER_ADDR\n"
        "srun --kill-on-bad-exit=1 bash -c '\n"
        'export NODE_RANK="$SLURM_NODEID"\n'
        f"exec {started.command}\n"
        "'\n"
    )
    return {FILE: f"#!/bin/bash\n{lines}{writing.header(how)}\n{body}", **started.files}
