"""The files by which the processes of a run know what to do. No torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from phalanx.job import Job, load_job
from phalanx.plan import Plan


def write_job(job: Job, folder: str | Path) -> None:
    """Write `job.json`: its name and its resolved sections."""
    table = {"name": job.name, "sections": job.to_dict()}
    (Path(folder) / "job.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def read_job(folder: str | Path) -> Job:
    """The job of a run folder."""
    table = json.loads((Path(folder) / "job.json").read_text(encoding="utf-8"))
    flags = {
        f"{section}.{key}": value
        for section, keys in table["sections"].items()
        for key, value in keys.items()
    }
    return replace(load_job(None, flags), name=table["name"])


def read_run(folder: str | Path) -> tuple[Job, Plan]:
    """The job and the plan of a run folder."""
    return read_job(folder), Plan.load(Path(folder) / "plan.json")
