"""`phalanx simulate`: play a plan's step on simulated hardware."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from phalanx.cli.job import FLAGS, JobFile
from phalanx.cli.output import JsonFile, emit, progress, show_report, versioned, write
from phalanx.cli.plan import On, verdict

_MAX_ROWS = 8  # pipeline ranks of the drawing


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("simulate", context_settings=FLAGS)(simulate)


def simulate(
    context: typer.Context,
    job: JobFile,
    on: On = "",
    trace: Annotated[str, typer.Option("--trace", help="Write a trace for ui.perfetto.dev.")] = "",
    picture: Annotated[
        str, typer.Option("--picture", help="Draw the step's timeline: FILE.png or FILE.svg.")
    ] = "",
    json_file: JsonFile = "",
) -> None:
    """Simulate one step of a job; --section.key VALUE overrides the file."""
    from phalanx.perfetto import write_perfetto
    from phalanx.planner.jobs import plan_job
    from phalanx.planner.step_picture import draw_step, pass_spans, timeline_text

    _, planned, simulated = plan_job(job, context.args, on)
    if trace:
        write_perfetto(trace, [simulated.trace])
        progress(f"{len(simulated.trace)} rows written to {trace}")
    spans = pass_spans(simulated.trace, planned.program.mesh)
    if picture:
        draw_step(spans, simulated.report.title, picture)
        progress(f"timeline drawn in {picture}")
    report = simulated.report.to_dict()
    document = versioned("simulation", fits=simulated.fits, report=report)

    def show() -> None:
        show_report(simulated.report)
        write(f"\n{_drawing(planned)}\n\n{timeline_text(spans)}\n\n{verdict(simulated)}\n")

    emit(document, json_file, show)
    if not simulated.fits:
        raise typer.Exit(1)


def _drawing(planned: Any) -> str:
    """The schedule, a row per pipeline rank."""
    from phalanx.check import format_grid
    from phalanx.plan import RoleProgram

    role: RoleProgram = planned.plan.program("train")
    num_ranks = role.grid().degree("pp")
    lists = role.built_order().order(num_ranks, planned.work.num_items)
    return format_grid(lists, max_ranks=_MAX_ROWS)
