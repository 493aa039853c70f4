"""`phalanx systems list|show|reproduce`: the published systems, and our numbers beside theirs."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.app import group
from phalanx.cli.output import (
    JsonFile,
    emit,
    paragraph,
    progress,
    show_report,
    table,
    versioned,
    write,
    write_file,
)
from phalanx.errors import JobError

if TYPE_CHECKING:
    from phalanx.systems import Published, System

_SHOWN = 12
_Name = Annotated[str, typer.Argument(metavar="NAME", help="A name from `systems list`.")]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verbs = group(app, "systems", "The published systems, and our numbers beside theirs.")
    verbs.command("list")(list_systems)
    verbs.command("show")(show_system)
    verbs.command("reproduce")(reproduce_system)


def list_systems(
    status: Annotated[
        str, typer.Option(metavar="STATUS", help="Only planned, experimental or verified ones.")
    ] = "",
    markdown: Annotated[
        str, typer.Option(metavar="FILE", help="Write the documentation page instead.")
    ] = "",
    json_file: JsonFile = "",
) -> None:
    """List all systems with their status."""
    from phalanx import systems
    from phalanx.registry import STATUSES

    if status and status not in STATUSES:
        rule = "no such status"
        raise JobError("job/bad-value", "--status", repr(status), rule, legal=STATUSES)
    if markdown:
        write_file(markdown, systems.to_markdown(), "--markdown")
        return
    chosen = [s for s in systems.all_systems() if not status or s.status == status]
    rows = [_summary(system) for system in chosen]

    def show() -> None:
        table(
            ("system", "status", "published", "reproduction", "what"),
            [
                [
                    row["slug"],
                    row["status"],
                    str(row["num_published"]),
                    "yes" if row["reproduction"] else "",
                    row["title"],
                ]
                for row in rows
            ],
        )
        counts = [f"{sum(r['status'] == s for r in rows)} {s}" for s in STATUSES]
        write("\n")
        paragraph(f"{len(rows)} systems: {', '.join(counts)}")

    emit(versioned("systems", systems=rows), json_file, show)


def show_system(
    name: _Name,
    every: Annotated[bool, typer.Option("--all", help="All published numbers.")] = False,
    json_file: JsonFile = "",
) -> None:
    """Show one system and its published numbers."""
    from phalanx import systems

    system = systems.get(name)
    rows = systems.published(name)
    document = versioned("system", **_summary(system), mechanism=system.mechanism)
    document |= {"papers": [asdict(paper) for paper in system.papers], "code": system.code}
    document["published"] = [asdict(row) for row in rows]

    def show() -> None:
        _describe(system)
        _show_published(rows if every else rows[:_SHOWN], len(rows))

    emit(document, json_file, show)


def reproduce_system(
    name: _Name,
    markdown: Annotated[
        str, typer.Option(metavar="FILE", help="Write the documentation page, too.")
    ] = "",
    picture: Annotated[
        str, typer.Option(metavar="FILE", help="Draw its picture, too: FILE.png or FILE.svg.")
    ] = "",
    json_file: JsonFile = "",
) -> None:
    """Put our numbers beside the published ones.

    Exits with 1 when a gated row misses its target.
    """
    from phalanx import systems

    system = systems.get(name)
    if system.has_reproduction:
        progress(f"reproducing {name}")
    report = systems.reproduce(name)
    if picture and not systems.draw(name, picture):
        rule = "this system has no picture"
        raise JobError("job/bad-value", "--picture", picture, rule)
    if markdown:
        beside = os.path.relpath(picture, os.path.dirname(markdown) or ".") if picture else ""
        write_file(markdown, systems.page(system, report, beside), "--markdown")
    emit(report.to_dict(), json_file, lambda: show_report(report))
    report.require_gates()


def _summary(system: System) -> dict:
    from phalanx.systems import published

    return {
        "slug": system.slug,
        "title": system.title,
        "status": system.status,
        "policies": list(system.policies),
        "modules": list(system.modules),
        "builds_on": list(system.builds_on),
        "missing": system.missing(),
        "reproduction": system.has_reproduction,
        "num_published": len(published(system.slug)),
    }


def _describe(system: System) -> None:
    write(f"{system.title} ({system.slug}): {system.status}\n\n")
    paragraph(system.mechanism)
    write("\n")
    for paper in system.papers:
        paragraph(f"{paper.title}. {paper.id}. {paper.where}.", hang=2)
    if system.code:
        write(f"Code of the authors: {system.code}\n")
    write("\n")
    for policy, entry in system.entries().items():
        here = f"{entry.status}, grain {entry.grain}" if entry else "to come"
        write(f"policy {policy}: {here}\n")
    missing = system.missing()
    for module in system.modules:
        write(f"module phalanx/{module}: {'to come' if module in missing else 'here'}\n")
    if system.builds_on:
        write(f"builds on {', '.join(system.builds_on)}\n")
    ours = f"phalanx systems reproduce {system.slug}" if system.has_reproduction else "none yet"
    write(f"reproduction: {ours}\n\n")


def _show_published(rows: list[Published], num_all: int) -> None:
    sources: dict[str, int] = {}
    lines = []
    for row in rows:
        number = sources.setdefault(row.source, len(sources) + 1)
        what = f"{row.experiment}: {row.metric}"
        lines.append([what, row.value, row.unit, row.setting, f"[{number}]"])
    table(("published", "value", "unit", "setting", "source"), lines)
    for source, number in sources.items():
        paragraph(f"[{number}] {source}", hang=4)
    if len(rows) < num_all:
        write("\n")
        paragraph(f"{num_all - len(rows)} more published numbers: add --all")
