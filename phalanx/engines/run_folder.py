"""The files by which the processes of a run know what to do. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.errors import JobError, PlanError, shown
from phalanx.job import Job, load_job
from phalanx.plan import Plan

JOB_FILE, PLAN_FILE = "job.json", "plan.json"


def write_job(job: Job, folder: str | Path) -> None:
    """Write `job.json`: its name, its resolved sections and where each value came from."""
    text = json.dumps(job_table(job), indent=1)
    (Path(folder) / JOB_FILE).write_text(text + "\n", encoding="utf-8")


def job_table(job: Job) -> dict[str, Any]:
    """A job as JSON holds it."""
    return {"name": job.name, "sections": job.to_dict(), "origin": dict(job.origin)}


def job_of(table: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> Job:
    """The job of such a table, with some keys (dotted) set anew."""
    flags = {
        f"{section}.{key}": value
        for section, keys in table["sections"].items()
        for key, value in keys.items()
    }
    changes = dict(changes or {})
    origin = dict(table["origin"]) | dict.fromkeys(changes, "flag")
    return replace(load_job(None, flags | changes), name=table["name"], origin=origin)


def read_job(folder: str | Path, changes: Mapping[str, Any] | None = None) -> Job:
    """The job of a run folder, with some keys (dotted) set anew.

    Raises:
        JobError: `job/not-found` for a folder without a run, `job/syntax` for a damaged file.
    """
    path = Path(folder) / JOB_FILE
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return job_of(table, changes)
    except OSError:
        runs = sorted(str(each.parent) for each in Path(folder).parent.glob(f"*/{JOB_FILE}"))
        rule = f"holds no run (no {JOB_FILE})"
        raise JobError("job/not-found", "run folder", folder, rule, legal=runs[-3:]) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"is not what Phalanx wrote: {type(error).__name__}: {error}"
        raise JobError("job/syntax", str(path), None, rule) from None


def require_same_result(job: Job, changed: Job) -> None:
    """Refuse a run that goes on as another job: only `[plan]` may change.

    Raises:
        PlanError: `plan/job` naming the first key that differs.
    """
    before = {key: value for key, value, _ in job.values()}
    for key, value, _ in changed.values():
        if not key.startswith("plan.") and value != before[key]:
            rule = "cannot change when a run goes on, only [plan] can; start a new run"
            raise PlanError("plan/job", key, shown(value), rule, legal=[shown(before[key])])


def read_run(folder: str | Path) -> tuple[Job, Plan]:
    """The job and the plan of a run folder."""
    return read_job(folder), Plan.load(Path(folder) / PLAN_FILE)
