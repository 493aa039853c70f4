"""`phalanx job show`: a job with every value and its origin."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.output import JsonFile, emit, table, versioned

JobFile = Annotated[str, typer.Argument(metavar="JOB", help="Job file (TOML).")]
FLAGS = {"ignore_unknown_options": True, "allow_extra_args": True}


def register(app: typer.Typer) -> None:
    """Add the verb."""
    group = typer.Typer(help="Look at job files.", rich_markup_mode=None)
    group.command("show", context_settings=FLAGS)(show)
    app.add_typer(group, name="job")


def show(context: typer.Context, job: JobFile, json_file: JsonFile = "") -> None:
    """Print each value of a job with its origin; --section.key VALUE overrides."""
    from phalanx.job import load_job, parse_flags

    resolved = load_job(job, parse_flags(context.args))
    values = [
        {"key": key, "value": value, "origin": origin} for key, value, origin in resolved.values()
    ]
    document = versioned("job", name=resolved.name, result_key=resolved.result_key, values=values)

    def lines() -> None:
        rows = [[str(v["key"]), _text(v["value"]), str(v["origin"])] for v in values]
        table(("key", "value", "from"), rows)

    emit(document, json_file, lines)


def _text(value: object) -> str:
    return '""' if value == "" else str(value)
