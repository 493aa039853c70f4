"""`phalanx run`: the whole way on this machine, from a job file to a report."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from phalanx.cli.job import FLAGS, JobFile
from phalanx.cli.output import JsonFile, emit, progress, versioned, write


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("run", context_settings=FLAGS)(run)


def run(
    context: typer.Context,
    job: JobFile,
    folder: Annotated[str, typer.Option("--folder", help="Run folder (runs/JOB-TIME).")] = "",
    plan: Annotated[
        str, typer.Option("--plan", help="Run this lockfile, made here for this job.")
    ] = "",
    check: Annotated[bool, typer.Option("--check", help="Exit 1 on a missed gate.")] = False,
    json_file: JsonFile = "",
) -> None:
    """Plan, tune, export, prove, serve and report a job; --section.key VALUE beats the file."""
    from phalanx.engines.whole.run import run_job
    from phalanx.engines.whole.train_job import asked_anew
    from phalanx.job import load_job, parse_flags
    from phalanx.pages import terminal

    asked = asked_anew(load_job(job, parse_flags(context.args)), folder, plan_file=plan)
    target = asked.folder
    result = run_job(asked, progress, live=sys.stderr.isatty())
    document = versioned("run", folder=str(target), report=result.report.to_dict())

    def show() -> None:
        write("\n".join(terminal(result.report)) + "\n")
        write(f"\n{target}/report.html, report.md, report.json, trace.perfetto.json\n")

    emit(document, json_file, show)
    if check and result.report.missed:
        raise typer.Exit(1)
