"""`phalanx plan`: what a job needs on a cluster, and the lockfile."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from phalanx.cli.job import FLAGS, JobFile
from phalanx.cli.output import JsonFile, emit, paragraph, show_report, versioned, write

On = Annotated[str, typer.Option("--on", help="Cluster, e.g. 8xh100; beats plan.on.")]
Output = Annotated[str, typer.Option("-o", "--output", help="Write the lockfile here.")]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("plan", context_settings=FLAGS)(plan)


def plan(
    context: typer.Context,
    job: JobFile,
    on: On = "",
    output: Output = "",
    explain: Annotated[
        bool, typer.Option("--explain", help="Show where values come from.")
    ] = False,
    json_file: JsonFile = "",
) -> None:
    """Plan a job: does it fit, how long is a step; --section.key VALUE overrides the file."""
    from phalanx.planner.jobs import plan_job
    from phalanx.planner.make import plan_table

    resolved, planned, simulated = plan_job(job, context.args, on)
    if output:
        planned.plan.save(output)
    document = versioned(
        "plan",
        fits=simulated.fits,
        plan=plan_table(planned.plan),
        report=simulated.report.to_dict(),
    )

    def show() -> None:
        show_report(simulated.report)
        write(f"\n{verdict(simulated)}\n")
        if explain:
            _explain(resolved, planned)

    emit(document, json_file, show)
    if not simulated.fits:
        raise typer.Exit(1)


def verdict(simulated: Any) -> str:
    """One sentence."""
    from phalanx.units import format_bytes

    peak, limit = format_bytes(simulated.peak_bytes), format_bytes(simulated.limit_bytes)
    if simulated.fits:
        return f"fits: {peak} of {limit} on the fullest device"
    return f"does not fit: the fullest device needs {peak} and has {limit}"


def _explain(resolved: Any, planned: Any) -> None:
    from phalanx.units import format_count

    write("\nmachine\n")
    for name, figure in planned.cluster.machine.figures().items():
        origin = f"{figure.kind}, {figure.source}, {figure.date}"
        paragraph(f"{name} = {figure.value:.4g}  ({origin})", indent=2, hang=4)
    write("job, where not a default\n")
    for key, value, origin in resolved.values():
        if origin != "default":
            paragraph(f"{key} = {value}  ({origin})", indent=2, hang=4)
    params = sum(unit.num_params for unit in planned.work.units)
    write(f"model\n  {len(planned.work.units)} units, {format_count(params)} parameters\n")
