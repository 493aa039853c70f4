"""`phalanx lab validate|calibrate|remember`: the planner against what was measured."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.app import group
from phalanx.cli.output import JsonFile, emit, paragraph, table, versioned, write, write_file
from phalanx.errors import GateError, JobError

if TYPE_CHECKING:
    from phalanx.lab.scored import Validation

Training = Annotated[
    str,
    typer.Option(metavar="FILE", help="Measured training steps: CSV, also gzipped."),
]
Serving = Annotated[str, typer.Option(metavar="FILE", help="Measured serving: CSV, also gzipped.")]
Markdown = Annotated[str, typer.Option(metavar="FILE", help="Write the scores as a page.")]
Picture = Annotated[
    str, typer.Option(metavar="FILE", help="Draw predicted against measured (PNG, SVG, PDF).")
]
Output = Annotated[
    str, typer.Option("-o", "--output", metavar="FILE", help="Write the machine file (TOML) here.")
]
Devices = Annotated[
    int, typer.Option(metavar="N", help="Processes that will train here; 0: one per GPU or core.")
]
Rows = Annotated[str, typer.Option(metavar="FILE", help="Write every comparison as CSV.")]
Gate = Annotated[bool, typer.Option("--gate", help="Exit 1 when a target is missed.")]
_MOST_REASONS = 5


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verbs = group(app, "lab", "The planner against measurements, and this machine measured.")
    verbs.command("validate")(validate_tables)
    verbs.command("calibrate")(calibrate)
    verbs.command("remember")(remember_runs)


def validate_tables(
    training: Training = "",
    serving: Serving = "",
    json_file: JsonFile = "",
    markdown: Markdown = "",
    picture: Picture = "",
    rows: Rows = "",
    gate: Gate = False,
) -> None:
    """Price measured rows and score the predictions; without FILE, on the tables shipped here.

    Exit 0: scored. 1: with --gate, a target is missed. 2: a table cannot be read, or no row of it
    has the minimum inputs.
    """
    from phalanx.lab.csv_rows import seen_table
    from phalanx.lab.page import page
    from phalanx.lab.rl_rows import read_rl
    from phalanx.lab.scored import comparisons_csv
    from phalanx.lab.serving_rows import read_serving
    from phalanx.lab.targets import judged
    from phalanx.lab.training_rows import read_training
    from phalanx.lab.validation import validate

    is_seen = not training and not serving
    if is_seen:
        training, serving = str(seen_table("training")), str(seen_table("serving"))
    found = validate(
        read_training(training) if training else [],
        read_serving(serving) if serving else [],
        read_rl(training) if training else [],
    )
    if picture:
        from phalanx.lab.picture import draw

        draw(found, picture)
    if markdown:
        write_file(markdown, page(found, _beside(markdown, picture), is_seen=is_seen), "--markdown")
    if rows:
        write_file(rows, comparisons_csv(found), "--rows")
    targets = judged(found)
    document = versioned("accuracy", **found.to_dict(), targets=targets)
    emit(document, json_file, lambda: _show(found, is_seen))
    if not found.predicted:
        reason, count = found.reasons().most_common(1)[0]
        rule = f"none of its {found.rows:,} rows could be priced: {count:,} {reason}"
        raise JobError("system/published", training or serving, None, rule)
    missed = [target["name"] for target in targets if target["met"] is False]
    if gate and missed:
        raise GateError("report/gate", "targets", None, f"missed: {'; '.join(missed)}")


def _beside(page: str, picture: str) -> str:
    """The path of the picture as the page must name it."""
    import os

    return os.path.relpath(picture, os.path.dirname(page) or ".") if picture else ""


def calibrate(output: Output = "", devices: Devices = 0, json_file: JsonFile = "") -> None:
    """Measure this machine, in about ten seconds: what `plan --on 2x./here.toml` plans for."""
    from pathlib import Path

    from phalanx.cli._plan_figures import quantity
    from phalanx.engines.machine_file import calibrate_machine, write_machine

    path = Path(output) if output else None
    machine = calibrate_machine(path.stem if path else "here", num_devices=devices)
    if path:
        write_machine(machine, path)
    figures = machine.figures()
    document = versioned(
        "machine",
        name=machine.name,
        title=machine.title,
        devices_per_domain=machine.devices_per_domain,
        topology=machine.topology,
        figures={name: asdict(figure) for name, figure in figures.items()},
    )

    def show() -> None:
        lines = [
            [name.replace("_", " "), quantity(name, figure.value), figure.kind]
            for name, figure in figures.items()
        ]
        table(("figure", "value", "kind"), lines, machine.title)
        write("\n")
        if path:
            here = path if path.is_absolute() else f"./{path}"
            paragraph(f"wrote {path}; plan for it with --on {machine.devices_per_domain}x{here}")
        else:
            paragraph("-o here.toml keeps this as a machine file, with the source of each figure")

    emit(document, json_file, show)


def remember_runs(
    folders: Annotated[list[str], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    output: Annotated[
        str,
        typer.Option("-o", "--output", metavar="FILE", help="Keep them here, not in the cache."),
    ] = "",
    json_file: JsonFile = "",
) -> None:
    """Keep the measured steps of finished runs, so that later plans on such a device use them."""
    from pathlib import Path

    from phalanx.planner.feedback import read_run, remember
    from phalanx.units import format_s

    runs = [read_run(folder) for folder in folders]
    kept = [remember(run, Path(output) if output else None) for run in runs]
    document = versioned("measured", runs=[asdict(run) for run in runs], files=[*map(str, kept)])

    def show() -> None:
        lines = [
            [run.name, format_s(run.step_s), str(run.num_steps), run.method, run.dtype, run.device]
            for run in runs
        ]
        table(("run", "step", "of steps", "method", "dtype", "device"), lines)
        write("\n")
        paragraph(f"kept in {', '.join(dict.fromkeys(map(str, kept)))}")

    emit(document, json_file, show)


def _show(found: Validation, is_seen: bool) -> None:
    from phalanx.lab.cross_validated import fold_scores
    from phalanx.lab.markdown import QUANTITY_NAMES, percent
    from phalanx.lab.page import figure, in_order
    from phalanx.lab.targets import TARGETS

    lines = [
        [
            name,
            QUANTITY_NAMES.get(quantity, quantity),
            str(score.sources),
            str(score.rows),
            percent(score.median),
            percent(score.p90),
            percent(score.bias, sign=True),
            percent(score.in_bar),
            percent(score.baseline),
        ]
        for (name, quantity), score in in_order(found)
    ]
    header = ("class", "quantity", "sources", "rows", "median", "p90", "bias", "in bars", "MFU")
    if lines:
        table(header, lines, "errors, medians over sources")
        write("\n")
    values = [(target, target.of(found)) for target in TARGETS]
    judged = [(target, value) for target, value in values if target.is_met(value) is not None]
    missed = [
        f"{target.name} ({figure(target, value)})"
        for target, value in judged
        if not target.is_met(value)
    ]
    paragraph(
        f"{found.rows:,} rows; {found.complete:,} with the minimum inputs, of which "
        f"{found.predicted:,} were priced"
    )
    for reason, count in found.reasons().most_common(_MOST_REASONS):
        paragraph(f"not priced: {reason} ({count:,} rows)", indent=2, hang=2)
    if is_seen:
        unseen = [
            f"{QUANTITY_NAMES.get(score.name, score.name)} {percent(score.figures['median'])}"
            for score in fold_scores()
        ]
        paragraph(
            "efficiencies were fitted on these rows; medians of rows that a fit has not seen: "
            + ", ".join(unseen)
        )
    if judged:
        paragraph(f"{len(judged) - len(missed)} of {len(judged)} targets met")
    for name in missed:
        paragraph(f"missed: {name}", indent=2, hang=2)
