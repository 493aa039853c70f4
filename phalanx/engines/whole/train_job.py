"""From a job to a trained model on this machine: data -> calibrate -> plan -> processes -> report.

What `phalanx train`, `phalanx run` and `phalanx.train` share. No torch in this process, unless a
launcher such as torchrun started it as one of the ranks itself.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from phalanx.cost.training import Workload
from phalanx.data.prepare import Prepared, prepare
from phalanx.engines.calibrate import calibrate, workload
from phalanx.engines.result import FILE_NAME, TrainResult
from phalanx.engines.run_folder import (
    PLAN_FILE,
    alone_in,
    finished,
    holds_checkpoint,
    holds_run,
    read_job,
    require_same_inputs,
    require_same_place,
    require_same_result,
    write_job,
    write_run_file,
)
from phalanx.engines.whole.live import Progress
from phalanx.engines.whole.predicted import training_report
from phalanx.engines.whole.processes import launch_training
from phalanx.engines.whole.refusals import require_held_out, require_outcome, require_writable
from phalanx.engines.whole.relaid import relaid
from phalanx.errors import JobError, PlanError, WorldError
from phalanx.job import Job
from phalanx.models.config import DecoderConfig
from phalanx.models.source import ModelSource, data_settings, model_source
from phalanx.models.stored import mark_of
from phalanx.plan import Plan
from phalanx.planner.here import (
    device_here,
    hardware_here,
    num_ranks_here,
    plan_here,
)
from phalanx.report import Report, Row
from phalanx.units import format_bytes

_BUSY_FRAC = 0.8


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a training run was asked for.

    Attributes:
        job: what to train; `plan.on` must be "here".
        folder: of the run; new, unless it goes on.
        resume: go on from the newest checkpoint of the folder.
        plan_file: a lockfile made here for this job, instead of planning anew.
        num_local_ranks: processes on this host (0: all of them).
        is_retry: an attempt that failed may have left things in the folder.
        note: what became of the job's layout, to be said.
    """

    job: Job
    folder: Path
    resume: bool = False
    plan_file: str = ""
    num_local_ranks: int = 0
    is_retry: bool = False
    note: str = ""

    @property
    def num_ranks(self) -> int:
        """Processes that train."""
        return num_ranks_here(self.job)

    def require_legal(self) -> None:
        """Refuse what can be refused before anything is read.

        Raises:
            PlanError: `plan/illegal` unless the job is for this machine.
            JobError: `job/bad-value` for a folder that holds a run which is not to go on.
        """
        if self.job.plan.on != "here":
            rule = "training runs on this machine; `phalanx plan` prices other clusters"
            raise PlanError("plan/illegal", "plan.on", self.job.plan.on, rule, legal=["here"])
        require_writable(self.folder)
        self.require_free()
        if self.resume:
            with alone_in(self.folder):
                pass  # what follows measures the machine, which would disturb a run under way

    def require_free(self) -> None:
        """Refuse a new run where one was, and to go on where there is nothing to go on with.

        Raises:
            JobError: `job/bad-value`, `job/not-found`.
        """
        if self.is_retry:
            return
        if not self.resume:
            if holds_run(self.folder):
                rule = f"holds a run; go on with it by `--resume {self.folder}` or name another"
                near = f"{self.folder}-{_stamp()}"
                raise JobError("job/bad-value", "--folder", self.folder, rule, legal=[near])
        elif (done := finished(self.folder)) is not None:
            rule = f"has come to its end after step {done.steps}; nothing is left to do"
            raise JobError("job/bad-value", "--resume", self.folder, rule)
        elif not holds_checkpoint(self.folder):
            rule = "holds no checkpoint to go on from; start the run anew in another folder"
            raise JobError("job/not-found", "--resume", self.folder, rule)


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A run whose folder holds its job and its plan.

    Attributes:
        source, data: the model and the samples, as the ranks will find them.
        work: the typical step.
    """

    asked: Asked
    source: ModelSource
    data: Prepared
    work: Workload
    plan: Plan

    @property
    def inputs(self) -> Mapping[str, str]:
        """Marks of the samples and the frozen weights, to know them again when the run goes on."""
        return _inputs(self.asked.job, self.source, self.data)

    @property
    def rates(self) -> Mapping[str, float]:
        """What this machine needs per operator, as measured for the plan."""
        return self.plan.hardware["rates"]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A finished run.

    Attributes:
        folder: with the adapter, the exported model, metrics and checkpoints.
        result: measured numbers.
        report: predicted and measured side by side.
    """

    folder: Path
    job: Job
    plan: Plan
    result: TrainResult
    report: Report

    def explain(self) -> str:
        """The report as a Markdown table."""
        return self.report.to_markdown()

    def to_pandas(self) -> Any:
        """The metrics of the run, a row per step or evaluation (needs pandas)."""
        import pandas

        return pandas.read_json(self.folder / self.result.metrics, lines=True)


def asked_anew(job: Job, folder: str | Path = "", *, plan_file: str = "") -> Asked:
    """A new run of `job`; its folder is `runs/JOB-TIME` unless named."""
    target = Path(folder) if folder else Path("runs") / f"{job.name}-{_stamp()}"
    return Asked(job=job, folder=target, plan_file=plan_file)


def asked_again(folder: str | Path, changes: dict[str, Any] | None = None) -> Asked:
    """A run that goes on, perhaps on other processes.

    Args:
        changes: keys (dotted) of `[plan]` that are set anew; the layout follows the number of
            processes (`relaid`).

    Raises:
        JobError: from the folder; PlanError: `plan/job` for a change of the result.
    """
    before = read_job(folder)
    job = read_job(folder, changes)
    require_same_result(before, job)
    require_same_place(job, folder)
    job, note = relaid(job, changes or {})
    return Asked(job=job, folder=Path(folder), resume=True, note=note)


def make_ready(
    asked: Asked,
    say: Callable[[str], None],
    forecast: Callable[[Ready], Sequence[Row]] | None = None,
    require: Callable[[DecoderConfig], None] | None = None,
) -> Ready:
    """Prepare the data, measure the machine, plan; nothing is written into the run folder yet.

    Args:
        forecast: gives further predictions, which the lockfile then holds too.
        require: refuses models of which more is asked than training.

    Raises:
        PhalanxError: whatever can be known before a process starts.
    """
    asked.require_legal()
    if asked.note:
        say(asked.note)
    given = Plan.load(asked.plan_file) if asked.plan_file else None
    if given is not None:
        given.require_here(hardware_here(asked.num_ranks), asked.job)
    source = model_source(asked.job, say)
    require_outcome(asked.job, asked.folder, asked.num_ranks, source)
    if require is not None:
        require(source.config)
    data = prepare(data_settings(asked.job, source.config), source.tokenizer_folder)
    require_held_out(asked.job, data)
    if asked.resume:
        require_same_inputs(asked.folder, _inputs(asked.job, source, data))
    audit = {name: count for name, count in asdict(data.audit).items() if count}
    say("data: " + ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in audit.items()))
    work = workload(asked.job, source.config, data, asked.num_ranks)
    plan = given or _planned(asked, source, work, say)
    ready = Ready(asked=asked, source=source, data=data, work=work, plan=plan)
    if forecast is not None:
        rows = [*plan.predictions, *map(asdict, forecast(ready))]
        ready = replace(ready, plan=replace(plan, predictions=_last_of_each(rows)))
    return ready


@contextmanager
def begun(ready: Ready, say: Callable[[str], None]) -> Iterator[None]:
    """Write job.json and plan.json into the run folder, in which no other run is meanwhile.

    Raises:
        JobError: as `alone_in` and `Asked.require_free`; `cli/file` for a disk that is full.
    """
    asked = ready.asked
    with alone_in(asked.folder):
        asked.require_free()  # another run may have ended there since it was looked at first
        write_job(asked.job, asked.folder, ready.inputs)
        write_run_file(asked.folder / PLAN_FILE, ready.plan.to_text())
        for row in ready.plan.predictions:
            say(f"predicted: {_said(row)}")
        yield


def _inputs(job: Job, source: ModelSource, data: Prepared) -> dict[str, str]:
    """Weights that are trained are in the checkpoint; those of a base that is frozen are not."""
    frozen = {"weights": mark_of(source.weights.values())} if job.train.method == "lora" else {}
    return {"samples": data.path.name} | frozen


def _last_of_each(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One row of each quantity: a lockfile that is run again is forecast again."""
    return list({row["quantity"]: row for row in rows}.values())


def _said(row: Mapping[str, Any]) -> str:
    value = row["value"]
    if value is None:
        return f"{row['quantity']}: unknown ({row['note']})"
    shown = format_bytes(value) if row["unit"] == "bytes" else f"{value:.4g} {row['unit']}"
    return f"{row['quantity']} = {shown.removesuffix(' 1')} ({row['source']})"


def _planned(asked: Asked, source: ModelSource, work: Workload, say: Callable[[str], None]) -> Plan:
    num_measuring = asked.num_local_ranks or asked.num_ranks
    say(f"calibrating: {num_measuring} processes measure this machine")
    rates = calibrate(source.config, work, num_processes=num_measuring, device=device_here())
    if rates["cores_frac"] < _BUSY_FRAC:
        share = f"{rates['cores_frac']:.0%}"
        say(f"note: other programs compete; this job got {share} of its cores")
    return plan_here(asked.job, source.config, work, rates, asked.num_ranks)


def train_ready(ready: Ready, say: Callable[[str], None], *, live: bool) -> TrainResult:
    """Launch the processes of a run and wait for them.

    Args:
        live: whether `say` goes to a terminal that redraws its last line.

    Raises:
        WorldError: from the ranks.
        KeyboardInterrupt: when the run was asked to stop; its ranks have saved and ended.
    """
    asked = ready.asked
    (asked.folder / FILE_NAME).unlink(missing_ok=True)
    say(f"training on {asked.num_ranks} processes")
    with Progress(say, live) as progress:
        try:
            launch_training(
                asked.folder,
                asked.num_ranks,
                progress.hear,
                hang_s=asked.job.plan.hang_s,
                resume=asked.resume,
            )
        except KeyboardInterrupt:
            raise interrupted(progress, asked, say) from None
        except WorldError:
            if progress.step and holds_checkpoint(asked.folder):
                say(f"what it saved stays; go on with: {_again(asked)}")
            raise
    if progress.interrupted:  # a rank was told by somebody else
        raise interrupted(progress, asked, say)
    return TrainResult.load(asked.folder)


def interrupted(progress: Progress, asked: Asked, say: Callable[[str], None]) -> KeyboardInterrupt:
    """The end of a run that was told to stop, after saying how to go on with it."""
    if progress.interrupted:
        say(f"stopped after step {progress.interrupted['step']}; go on with: {_again(asked)}")
    elif (done := finished(asked.folder)) is not None:
        say(f"the run had come to its end already, after step {done.steps}")
    elif holds_checkpoint(asked.folder):
        say(f"stopped; what it saved before stays; go on with: {_again(asked)}")
    else:
        say("stopped before a checkpoint could be written")
    return KeyboardInterrupt()


def _again(asked: Asked) -> str:
    return f"phalanx train --resume {shlex.quote(str(asked.folder))}"


def train(asked: Asked, say: Callable[[str], None] = print, *, live: bool = False) -> Trained:
    """Train what was asked, and compare with what was predicted.

    Args:
        say: gets the progress, one line at a time.
        live: as `train_ready`.

    Raises:
        PhalanxError: whatever stops the run; what was done before stays in the folder.
    """
    ready = make_ready(asked, say)
    with begun(ready, say):
        try:
            result = train_ready(ready, say, live=live)
        except KeyboardInterrupt:
            if (ended := finished(asked.folder)) is None:
                raise
            result = ended  # it was told to stop when there was nothing left to stop
        return trained(ready, result)


def trained(ready: Ready, result: TrainResult) -> Trained:
    """A finished run with its report, also written to its folder."""
    asked, report = ready.asked, training_report(ready.asked.job.name, ready.plan, result)
    report.save(asked.folder / "report.json")
    return Trained(
        folder=asked.folder, job=asked.job, plan=ready.plan, result=result, report=report
    )


def _stamp() -> str:
    return datetime.now().strftime("%Y%m%d-%H%M%S")
