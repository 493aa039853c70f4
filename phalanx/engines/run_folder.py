"""The files by which the processes of a run know what to do, and who may write them. No torch."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.engines.result import FILE_NAME, TrainResult
from phalanx.engines.signs import FOLDER as WATCH
from phalanx.errors import JobError, PlanError, shown
from phalanx.job import Job, load_job
from phalanx.job.keys import describe_keys
from phalanx.plan import Plan
from phalanx.whole_file import write_whole

JOB_FILE, PLAN_FILE = "job.json", "plan.json"
LOCK_FILE = "running"  # below the folder of signs
CHECKPOINTS = "checkpoints"
_OF_A_RUN = (FILE_NAME, "metrics.jsonl", CHECKPOINTS)  # what a folder has once ranks ran in it
_PATHS = {"model.name", "train.adapter"}  # keys that may hold one
_PATHS |= {"data.source", "data.held_out_source", "data.chat_template"}
_CHANGED = {
    "samples": "rows, tokenizer, chat template or the model's context have changed",
    "weights": "the files of the model have changed",
}
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def holds_run(folder: Path) -> bool:
    """Whether ranks have run in a folder."""
    return any((folder / name).exists() for name in _OF_A_RUN)


def holds_checkpoint(folder: Path) -> bool:
    """Whether a run has left something to go on from, damaged or not."""
    # a process that was killed while it replaced a checkpoint leaves the old one aside
    kinds = ("step-*", ".step-*.replaced")
    return any(any((folder / CHECKPOINTS).glob(kind)) for kind in kinds)


def finished(folder: Path) -> TrainResult | None:
    """The result of a run that has come to its end; None where there is more to do."""
    try:
        result = TrainResult.load(folder)
    except (OSError, ValueError, TypeError):  # none, or half of one
        return None
    return None if result.stopped == "signal" else result


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make a run folder, and keep other runs out of it until the block or this process ends.

    Where the file system has no locks, nobody is kept out.

    Raises:
        JobError: `job/bad-value` for a folder in which a run is under way, `cli/file` for one that
            cannot be written.
    """
    try:
        (folder / WATCH).mkdir(parents=True, exist_ok=True)
        file = (folder / WATCH / LOCK_FILE).open("a+", encoding="utf-8")
    except OSError as error:
        rule = f"cannot be written: {(error.strerror or str(error)).lower()}"
        raise JobError("cli/file", "--folder", folder, rule) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            rule = f"a run is under way in it ({file.read().strip() or 'which starts just now'})"
            rule += "; wait for it, stop it or name another folder"
            raise JobError("job/bad-value", "--folder", folder, rule) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def write_run_file(path: Path, text: str) -> None:
    """Write a file of a run folder, whole.

    Raises:
        JobError: `cli/file` where it cannot be written.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        rule = f"cannot be written: {(error.strerror or str(error)).lower()}"
        raise JobError("cli/file", "run folder", path, rule) from error


def write_job(job: Job, folder: str | Path, inputs: Mapping[str, str] | None = None) -> None:
    """Write `job.json`: its name, its resolved sections and where each value came from.

    Args:
        inputs: marks of what the job's names stand for (`require_same_inputs`); None: not known.
    """
    table = (
        job_table(job) | {"began_in": os.getcwd()} | ({"inputs": dict(inputs)} if inputs else {})
    )
    write_run_file(Path(folder) / JOB_FILE, json.dumps(table, indent=1) + "\n")


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
    """The job of a run folder, with some keys (dotted) set anew; keys that it lacks, as the release
    that wrote it had none of them, are at their defaults.

    Raises:
        JobError: `job/not-found` for a folder without a run, `job/syntax` for a damaged file,
            `job/unknown-key` for one that a later release wrote.
    """
    path = Path(folder) / JOB_FILE
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        _require_known(table["sections"], path)
        return job_of(table, changes)
    except OSError:
        runs = sorted(str(each.parent) for each in Path(folder).parent.glob(f"*/{JOB_FILE}"))
        rule = f"holds no run (no {JOB_FILE})"
        raise JobError("job/not-found", "run folder", folder, rule, legal=runs[-3:]) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"is not what Phalanx wrote: {type(error).__name__}: {error}"
        raise JobError("job/syntax", str(path), None, rule) from None


def _require_known(sections: Mapping[str, Any], path: Path) -> None:
    known = {each.key for each in describe_keys()}
    for section, keys in sections.items():
        for key, value in keys.items():
            if f"{section}.{key}" not in known:
                rule = "this release has no such key; go on with the release that wrote it"
                where = f"{path}: {section}.{key}"
                raise JobError("job/unknown-key", where, shown(value), rule)


def require_same_place(job: Job, folder: str | Path) -> None:
    """Refuse to go on in another working folder, where relative names of the job mean nothing.

    Raises:
        JobError: `job/not-found`, naming the folder in which the run began.
    """
    table = json.loads((Path(folder) / JOB_FILE).read_text(encoding="utf-8"))
    began_in = Path(table.get("began_in") or ".")
    for key, value, _ in job.values():
        if key in _PATHS and value and not Path(value).exists() and (began_in / value).exists():
            rule = f"is not here; the run began in {began_in}: go on with it from there"
            raise JobError("job/not-found", key, value, rule)


def require_same_inputs(folder: str | Path, inputs: Mapping[str, str]) -> None:
    """Refuse a run that would go on with other rows, which its counter of samples would misname, or
    on other frozen weights, though both have the names that they had.

    Args:
        inputs: marks of what is there now, as `write_job` took them.

    Raises:
        PlanError: `plan/job`.
    """
    before = json.loads((Path(folder) / JOB_FILE).read_text(encoding="utf-8")).get("inputs", {})
    for name, mark in inputs.items():
        if before.get(name, mark) != mark:
            rule = f"is not what the run began with: {_CHANGED[name]}; put it back, or start anew"
            raise PlanError("plan/job", name, mark, rule, legal=[before[name]])


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
