"""`phalanx train`: fine-tune or pretrain a model on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.job import (
    FLAGS,
    DataSource,
    ModelName,
    Words,
    one_job,
    resolve,
    split_words,
)
from phalanx.cli.output import JsonFile, emit, paragraph, progress, show_report, versioned, write
from phalanx.errors import JobError

if TYPE_CHECKING:
    from phalanx.engines.placed import Placed
    from phalanx.engines.whole.train_job import Asked, Trained
    from phalanx.job import Job


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("train", context_settings=FLAGS)(train)


def train(
    words: Words = None,
    model: ModelName = "",
    data: DataSource = "",
    procs: Annotated[
        int, typer.Option("--procs", min=0, help="Processes that train (0: one per core).")
    ] = 0,
    folder: Annotated[
        str, typer.Option("--folder", help="Run folder, to be made (runs/JOB-TIME).")
    ] = "",
    resume: Annotated[
        str,
        typer.Option(
            "--resume", metavar="FOLDER", help="Go on with this run, on any number of processes."
        ),
    ] = "",
    plan: Annotated[
        str, typer.Option("--plan", metavar="FILE", help="Run this lockfile, made for here.")
    ] = "",
    check: Annotated[bool, typer.Option("--check", help="Exit 1 on a missed gate.")] = False,
    json_file: JsonFile = "",
) -> None:
    """Fine-tune or pretrain a model on this machine.

    A job comes from a file, from flags, or from both: every key of a job is a flag, listed by
    `phalanx job keys`. Data is prepared and the run is planned before a process starts; what was
    predicted stands beside what was measured at the end. Ctrl-C saves a checkpoint first.

    \b
    phalanx train --model gemma3-270m --data python-docs
    phalanx train --model M --data chat.jsonl --train.method full --folder RUN
    phalanx train job.toml --train.lr 1e-4 --procs 2
    phalanx train --resume RUN --procs 1

    Under torchrun or srun each process is one rank of the run:

    \b
    torchrun --nproc-per-node 2 -m phalanx train --model M --data D --folder RUN
    srun -n 8 phalanx train --model M --data D --folder RUN

    Exit code: 0 done, 1 a gate was missed (--check), 2 bad input or a rank failed, 130 stopped.
    """
    from phalanx.engines.placed import placed

    place = placed(os.environ)
    if place is not None:
        procs = _agreed(procs, place)
    names, arguments = split_words(words)
    others = {"plan.devices": procs or None}

    def ask() -> Asked:
        if resume:
            return _again(resume, names, arguments, model, data, others, folder, plan)
        from phalanx.engines.whole.train_job import asked_anew

        job = resolve(one_job(names), model, data, arguments, others)
        laid_out = _laid_out(plan, job, arguments) if plan else {}
        if laid_out:
            job = resolve(one_job(names), model, data, arguments, others | laid_out)
        return asked_anew(job, folder, plan_file="" if laid_out else plan)

    done = _run(ask, place)
    if done is not None:
        document = versioned("train", folder=str(done.folder), report=done.report.to_dict())
        emit(document, json_file, lambda: _show(done))
        if check and done.report.missed:
            raise typer.Exit(1)


def _laid_out(path: str, job: Job, arguments: list[str]) -> dict[str, Any]:
    """Keys of a plan that `phalanx plan -o` wrote; none of a lockfile that a run wrote."""
    from phalanx.job import parse_flags
    from phalanx.plan import Plan
    from phalanx.planner.lockfile import layout_keys

    keys = layout_keys(Plan.load(path), job)
    for flag, value in parse_flags(arguments).items() if keys else ():
        is_laid_out = any(flag == key or flag.startswith(f"{key}.") for key in keys)
        if is_laid_out and str(value) != str(keys.get(flag)):
            rule = "stands in the lockfile; leave it out, or plan the job again with it"
            raise JobError("job/syntax", f"--{flag}", path, rule)
    return keys


def _agreed(procs: int, place: Placed) -> int:
    """As many processes as the outer launcher has started."""
    if procs not in (0, place.num_ranks):
        rule = "the launcher above has started another number of processes"
        raise JobError("cli/usage", "--procs", procs, rule, legal=[place.num_ranks])
    return place.num_ranks


def _again(
    resume: str,
    names: list[str],
    arguments: list[str],
    model: str,
    data: str,
    others: dict[str, Any],
    folder: str,
    plan: str,
) -> Asked:
    """The run of a folder, with some keys of [plan] set anew."""
    from phalanx.engines.whole.train_job import asked_again
    from phalanx.job import parse_flags

    given = {"JOB": names, "--model": model, "--data": data, "--folder": folder, "--plan": plan}
    for option, value in given.items():
        if value:
            rule = "cannot stand beside --resume, which takes all of it from the run's folder"
            raise JobError("cli/usage", option, value, rule)
    changes = dict(parse_flags(arguments)) | {k: v for k, v in others.items() if v is not None}
    return asked_again(resume, changes)


def _run(ask: Callable[[], Asked], place: Placed | None) -> Trained | None:
    """Train; the finished run, None on ranks that have nothing to say."""
    live = sys.stderr.isatty()
    if place is None:
        from phalanx.engines.whole.train_job import train as train_here

        return train_here(ask(), progress, live=live)
    place.adopt(os.environ)
    from phalanx.engines.whole.rank_job import RankZeroFailed, train_as_rank

    try:
        return train_as_rank(place, ask, progress, live=live)
    except RankZeroFailed as failed:
        raise typer.Exit(failed.exit_code) from None


def _show(done: Trained) -> None:
    from dataclasses import replace

    notes = {name: done.report.notes[name] for name in ("stopped",) if name in done.report.notes}
    show_report(replace(done.report, notes=notes))
    for sample in done.result.samples:
        write("\n")
        paragraph(f"prompt: {_flat(sample['prompt'])}", hang=4)
        paragraph(f"before: {_flat(sample['before'])}", hang=4)
        paragraph(f"after: {_flat(sample['after'])}", hang=4)
    write("\n")
    for what in ("adapter", "export", "gguf"):
        if path := getattr(done.result, what):
            write(f"{what}: {done.folder / path}\n")
    if done.result.export:
        write(f"serve it: phalanx serve {done.folder / done.result.export}\n")


def _flat(text: str) -> str:
    return " ".join(text.split()) or "(nothing)"
