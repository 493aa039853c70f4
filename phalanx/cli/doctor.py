"""`phalanx doctor`: what this machine has, what it lacks, what to install."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from phalanx.cli.output import JsonFile, emit, paragraph, table, versioned, write


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("doctor")(doctor)


def doctor(
    deep: Annotated[
        bool, typer.Option("--deep", help="Also import torch and ask it (1-2 s).")
    ] = False,
    json_file: JsonFile = "",
) -> None:
    """Say what is missing on this machine."""
    from phalanx.doctor import STATES, examine

    findings = examine(deep=deep)
    counts = {state: sum(each.state == state for each in findings) for state in STATES}

    def show() -> None:
        table(("topic", "state", "found"), [[f.topic, f.state, f.found] for f in findings])
        advised = [each for each in findings if each.advice]
        write("\n")
        for each in advised:
            paragraph(f"{each.topic}: {each.advice}", hang=4)
        write(("\n" if advised else "") + ", ".join(f"{n} {s}" for s, n in counts.items()) + "\n")

    document = versioned("doctor", findings=[asdict(f) for f in findings], counts=counts)
    emit(document, json_file, show)
