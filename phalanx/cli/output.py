"""What all verbs print with: tables, reports, JSON. Terminals get rich, everything else plain text.

A verb builds a document (a dictionary) and a way to show it, and calls `emit` once.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from phalanx.errors import JobError
from phalanx.report import Report, compare, to_table

FORMAT_VERSION = 1
_WHOLE = 24  # columns up to this many characters keep their words whole
JsonFile = Annotated[
    str,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the result as JSON to FILE; '-': to standard output, instead of the text.",
    ),
]
_NUMBER = re.compile(r"^[-+]?[\d.,]+(e[-+]?\d+)?\s?[%x]?$|^(unknown)?$")


def emit(document: Mapping[str, Any], json_file: str, show: Callable[[], None]) -> None:
    """Print the result: as text, as text with a JSON file beside it, or as JSON alone.

    Args:
        document: the versioned form; see `versioned`.
        json_file: what `--json` was given: "" for none, "-" for standard output.
        show: prints the text.

    Raises:
        JobError: `cli/file` when the file cannot be written.
    """
    text = json.dumps(document, indent=1) + "\n"
    if json_file == "-":
        write(text)
        return
    show()
    if json_file:
        write_file(json_file, text, "--json")


def versioned(kind: str, **content: Any) -> dict[str, Any]:
    """A JSON document of this kind: format_version, kind, content."""
    return {"format_version": FORMAT_VERSION, "kind": kind} | content


def write_file(path: str, text: str, where: str) -> None:
    """Write a file that the user named.

    Raises:
        JobError: `cli/file` with the system's reason.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise JobError("cli/file", where, path, f"cannot be written: {reason}") from error


def write(text: str) -> None:
    """To standard output; a reader that stopped reading (`| head`) is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def progress(text: str) -> None:
    """One line of progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def paragraph(text: str, indent: int = 0, hang: int = 0) -> None:
    """Text wrapped to the terminal (at most 100 columns; 100 where there is no terminal)."""
    lines = textwrap.wrap(
        text,
        max(min(100, _width()), indent + hang + 20),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hang),
        break_on_hyphens=False,
        break_long_words=False,
    )
    write("\n".join(lines) + "\n")


def table(header: Sequence[str], lines: Sequence[Sequence[str]], title: str = "") -> None:
    """A table; columns of numbers stand right. Columns that are empty throughout are left out."""
    kept = [at for at in range(len(header)) if any(line[at] for line in lines)]
    head = [header[at] for at in kept]
    body = [[line[at] for at in kept] for line in lines]
    right = [all(_NUMBER.match(line[at]) for line in body) for at in range(len(head))]
    widths = [max(map(len, column)) for column in zip(head, *body)]
    if not _is_terminal():
        _plain_table(head, body, right, widths, title)
    elif sum(min(width, _WHOLE) + 3 for width in widths) > _width():
        _records(head, body, title)
    else:
        _rich_table(head, body, right, widths, title)


def show_report(report: Report) -> None:
    """A report as a table, its notes as numbered lines below, its missed gates last."""
    header, lines = to_table(compare([report]))
    notes: dict[str, int] = {}
    for line in lines:
        if line[-1]:
            line[-1] = f"[{notes.setdefault(line[-1], len(notes) + 1)}]"
    table(header, lines, report.title)
    for note, number in notes.items():
        paragraph(f"[{number}] {note}", hang=4)
    for name, text in report.notes.items():
        if isinstance(text, str):
            paragraph(f"{name}: {text}", hang=4)
    gated = [row for row in report.rows if row.passed is not None]
    if gated:
        met = len(gated) - len(report.missed)
        write(f"{met} of {len(gated)} gated rows met\n")


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def _width() -> int:
    return shutil.get_terminal_size((100, 24)).columns if _is_terminal() else 100


def _records(header: Sequence[str], lines: Sequence[Sequence[str]], title: str) -> None:
    write(f"{title}\n" if title else "")
    for line in lines:
        write(f"{line[0]}\n")
        cells = [f"{name} {cell}" for name, cell in zip(header[1:], line[1:]) if cell]
        paragraph("; ".join(cells), indent=2)


def _plain_table(
    header: Sequence[str],
    lines: Sequence[Sequence[str]],
    right: Sequence[bool],
    widths: Sequence[int],
    title: str,
) -> None:
    rule = ["-" * width for width in widths]
    out = [title] if title else []
    for line in (header, rule, *lines):
        cells = [
            cell.rjust(width) if at_right else cell.ljust(width)
            for cell, width, at_right in zip(line, widths, right)
        ]
        out.append("  ".join(cells).rstrip())
    write("\n".join(out) + "\n")


def _rich_table(
    header: Sequence[str],
    lines: Sequence[Sequence[str]],
    right: Sequence[bool],
    widths: Sequence[int],
    title: str,
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    grid = Table(
        box=SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False, show_edge=False
    )
    for name, at_right, width in zip(header, right, widths):
        justify: Literal["left", "right"] = "right" if at_right else "left"
        grid.add_column(name, justify=justify, overflow="fold", no_wrap=width <= _WHOLE)
    for line in lines:
        grid.add_row(*line)
    Console(markup=False, highlight=False, emoji=False).print(grid)
