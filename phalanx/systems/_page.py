"""The documentation page of one system: what it is, its policies, its numbers, what ran where."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

from phalanx.report import Report, compare, to_table
from phalanx.systems._system import System


def page(system: System, report: Report, picture: str = "") -> str:
    """Markdown of a system and its reproduction.

    Args:
        picture: file name of a picture, beside the page.
    """
    lines = [
        f"# {system.title}",
        "",
        f"Written by `phalanx systems reproduce {system.slug} --markdown FILE`; do not edit.",
        "",
        system.mechanism,
        "",
        *(f"- {paper.title}. {paper.id}. {paper.where}." for paper in system.papers),
    ]
    if picture:
        lines += ["", f"![{system.title}]({picture})"]
    lines += _policies(system)
    lines += ["", "## Numbers", "", *_numbers(report)]
    if system.ran:
        lines += ["", "## What ran where", "", *(f"- {each}" for each in system.ran)]
    return "\n".join(lines) + "\n"


def _policies(system: System) -> Iterator[str]:
    for name, entry in system.entries().items():
        if entry is None:
            continue
        yield from ("", f"## `{name}` ({entry.status}, grain {entry.grain})", "")
        yield from ("```text", *inspect.cleandoc(entry.cls.__doc__ or "").splitlines(), "```")


def _numbers(report: Report) -> Iterator[str]:
    header, rows = to_table(compare([report]))
    yield f"{sum(row.passed is True for row in report.rows)} gates, {len(report.missed)} missed."
    yield ""
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
    yield from _notes(report.notes)


def _notes(notes: Mapping[str, object]) -> Iterator[str]:
    for name, text in notes.items():
        yield from ("", f"*{name}*: {text}")
