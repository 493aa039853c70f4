"""Functions of the names of the verbs, for Python programs: they return objects and never exit.

import phalanx
run = phalanx.train(model="gemma3-270m", data="python-docs", keys={"train.steps": 20})
print(run.explain())
run.to_pandas().plot(x="step", y="loss")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.engines.whole.train_job import Trained
    from phalanx.job import Job


def train(
    job: str | Path | Job = "",
    *,
    model: str = "",
    data: str = "",
    procs: int = 0,
    folder: str | Path = "",
    resume: str | Path = "",
    keys: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = print,
) -> Trained:
    """Train on this machine, as `phalanx train` does.

    Args:
        job: file, or a job.
        model, data: short for the keys model.name and data.source.
        procs: processes (0: one per core).
        folder: run folder, to be made ("": runs/JOB-TIME).
        resume: folder of a run that goes on, instead of a job; `keys` are then of [plan].
        keys: dotted key -> value; they beat the file.
        say: gets the progress, one line at a time.

    Returns:
        The finished run: `.result`, `.report`, `.explain()`, `.to_pandas()`.

    Raises:
        PhalanxError: as the command line says them.
        KeyboardInterrupt: when interrupted, after a checkpoint was saved.
    """
    from phalanx.engines.whole import train_job
    from phalanx.job import Job, load_job

    short = {"model.name": model, "data.source": data, "plan.devices": procs}
    flags = {key: value for key, value in short.items() if value} | dict(keys or {})
    if resume:
        asked = train_job.asked_again(resume, flags)
    elif isinstance(job, Job):
        asked = train_job.asked_anew(job, folder)
    else:
        asked = train_job.asked_anew(load_job(job or None, flags), folder)
    return train_job.train(asked, say)
