"""`phalanx policies`: every strategy that is registered, by family."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.output import JsonFile, emit, table, versioned, write


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("policies")(policies)


def policies(
    family: Annotated[str, typer.Argument(help="Only this family (data, pipeline, ...).")] = "",
    json_file: JsonFile = "",
) -> None:
    """List the registered policies."""
    from phalanx.registry import SHAPE_OF_FAMILY, entries

    found = entries(family or None)
    rows = [
        {
            "family": entry.family,
            "name": entry.name,
            "shape": SHAPE_OF_FAMILY[entry.family],
            "grain": entry.grain,
            "status": entry.status,
            "source": ", ".join(filter(None, (entry.source.id, entry.source.where))),
            "title": entry.source.title,
        }
        for entry in found
    ]
    columns = ("shape", "grain", "status", "source")

    def show() -> None:
        lines = [[f"{row['family']}/{row['name']}", *(row[c] for c in columns)] for row in rows]
        if lines:
            table(("policy", *columns), lines)
        else:
            write(f"no policy of the family {family} yet\n")

    emit(versioned("policies", policies=rows), json_file, show)
