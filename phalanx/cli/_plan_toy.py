"""`phalanx plan` of a toy or a schedule: one step is played on one cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from phalanx.cli._lockfile import put_lockfile
from phalanx.cli.output import emit, paragraph, show_report, versioned, write

if TYPE_CHECKING:
    from phalanx.job import Job


def simulate(job: Job, on: str, output: str, explain: bool, json_file: str) -> None:
    """A toy or a schedule: one step is played on one cluster."""
    from phalanx.planner.jobs import simulate_job
    from phalanx.planner.make import plan_table

    planned, simulated = simulate_job(job, on)
    if output:
        put_lockfile(planned.plan, output, on)
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
            _explain(job, planned)

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


def _explain(job: Any, planned: Any) -> None:
    from phalanx.cli._plan_figures import quantity
    from phalanx.units import format_count

    write("\nmachine\n")
    for name, figure in planned.cluster.machine.figures().items():
        origin = f"{figure.kind}, {figure.source}, {figure.date}"
        paragraph(f"{name} = {quantity(name, figure.value)}  ({origin})", indent=2, hang=4)
    write("job, where not a default\n")
    for key, value, origin in job.values():
        if origin != "default":
            paragraph(f"{key} = {value}  ({origin})", indent=2, hang=4)
    params = sum(unit.num_params for unit in planned.work.units)
    write(f"model\n  {len(planned.work.units)} units, {format_count(params)} parameters\n")
