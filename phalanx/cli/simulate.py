"""`phalanx simulate`: play a plan's step on simulated hardware."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli._plan_options import On
from phalanx.cli._plan_toy import verdict
from phalanx.cli.job import FLAGS
from phalanx.cli.output import JsonFile, emit, progress, show_report, versioned, write
from phalanx.errors import JobError

if TYPE_CHECKING:
    from phalanx.plan import RoleProgram
    from phalanx.planner.step_picture import PassSpan
    from phalanx.policy import Step
    from phalanx.trace import Trace

_MAX_ROWS = 8  # pipeline ranks of the drawing


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("simulate", context_settings=FLAGS)(simulate)


def simulate(
    context: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB | MODEL", help="Job file (TOML), or a model.")],
    on: On = "",
    plan: Annotated[
        str, typer.Option("--plan", metavar="FILE", help="Play the layout of a plan.json.")
    ] = "",
    trace: Annotated[str, typer.Option("--trace", help="Write a trace for ui.perfetto.dev.")] = "",
    picture: Annotated[
        str, typer.Option("--picture", help="Draw the step's timeline: FILE.png or FILE.svg.")
    ] = "",
    schedule: Annotated[
        str, typer.Option("--schedule", help="Write the pipeline's lists as CSV, as torch reads.")
    ] = "",
    documents: Annotated[
        str,
        typer.Option(
            "--documents",
            metavar="FILE",
            help="Play other documents on every data rank: a JSON line per rank, a list of "
            "micro-batches, each a list of lengths in tokens.",
        ),
    ] = "",
    rates: Annotated[
        str,
        typer.Option(
            "--rates",
            help="Whose: fitted (those of published runs, as `phalanx plan` prices a model) or "
            "machine (as its file says, to compare orders).",
        ),
    ] = "fitted",
    json_file: JsonFile = "",
) -> None:
    """Simulate one step of a job; --section.key VALUE sets a key of it."""
    from phalanx.planner.document_step import read_documents, simulate_documents
    from phalanx.planner.jobs import plan_job, read_job
    from phalanx.planner.step_picture import pass_spans, timeline_text

    if documents:
        if plan:
            raise JobError("job/syntax", "--plan", plan, "means nothing beside --documents")
        read = read_job(job, context.args)
        found = simulate_documents(read, read_documents(documents), on)
        _write_files(found.trace, found.spans(), found.report.title, trace, picture)
        document = versioned("simulation", report=found.report.to_dict())

        def show_documents() -> None:
            show_report(found.report)
            write(f"\ndata rank {found.slowest}, the slowest\n{timeline_text(found.spans())}\n")

        emit(document, json_file, show_documents)
        return
    _, planned, simulated = plan_job(job, context.args, on, plan, rates)
    spans = pass_spans(simulated.trace, planned.program.mesh)
    _write_files(lambda: simulated.trace, spans, simulated.report.title, trace, picture)
    if schedule:
        _write_schedule(planned, schedule)
    report = simulated.report.to_dict()
    document = versioned("simulation", fits=simulated.fits, report=report)

    def show() -> None:
        show_report(simulated.report)
        write(f"\n{_drawing(planned)}\n\n{timeline_text(spans)}\n\n{verdict(simulated)}\n")

    emit(document, json_file, show)
    if not simulated.fits:
        raise typer.Exit(1)


def _write_files(
    make_trace: Callable[[], Trace],
    spans: Sequence[PassSpan],
    title: str,
    trace: str,
    picture: str,
) -> None:
    """The trace and the picture, where they are asked for."""
    from phalanx.perfetto import write_perfetto
    from phalanx.planner.step_picture import draw_step

    if trace:
        made = make_trace()
        write_perfetto(trace, [made])
        progress(f"{len(made)} rows written to {trace}")
    if picture:
        draw_step(spans, title, picture)
        progress(f"timeline drawn in {picture}")


def _drawing(planned: Any) -> str:
    """The schedule, a row per pipeline rank."""
    from phalanx.check import format_grid

    return format_grid(_lists(planned), max_ranks=_MAX_ROWS)


def _write_schedule(planned: Any, path: str) -> None:
    from phalanx.schedule_file import write_schedule

    lists = _lists(planned)
    write_schedule(path, lists)
    progress(f"schedule of {len(lists)} ranks written to {path}")


def _lists(planned: Any) -> list[list[Step]]:
    """What each pipeline rank computes, in order."""
    role: RoleProgram = planned.plan.program("train")
    return role.built_order().order(role.grid().degree("pp"), planned.work.num_items)
