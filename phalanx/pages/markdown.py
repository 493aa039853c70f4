"""The page of a run in Markdown, with pictures beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from phalanx.pages.canvas import Picture
from phalanx.pages.content import (
    RunPage,
    all_rows,
    compared,
    gate_text,
    loss_sentence,
    missed_sentences,
    parity_sentence,
    short,
    stages,
    verdict,
)
from phalanx.pages.html import INSTALL
from phalanx.pages.prices import beside_published, machines, remarks
from phalanx.pages.shown import percent, shown, shown_row, visible
from phalanx.report import Row

_MARKS = {None: "", True: "pass", False: "MISS"}
_TITLES = {
    "loss": "Course of training",
    "memory": "Memory of a process",
    "timeline": "One step, simulated and measured",
}


def render_markdown(page: RunPage, pictures: Sequence[Picture]) -> str:
    """The whole file; pictures are named, not contained."""
    parts = [
        _head(page),
        _compared(page),
        _parity(page),
        *(_picture(each) for each in pictures),
        _samples(page),
        _elsewhere(page),
        _stages(page),
        _closing(page),
        _all(page),
    ]
    return "\n".join(part for part in parts if part)


def _head(page: RunPage) -> str:
    lines = [f"# {escaped(page.title)}: run report", "", f"**{verdict(page.report)}**", ""]
    lines += [f"- missed: {escaped(line)}" for line in missed_sentences(page.report)]
    lines += ["", " · ".join(map(escaped, page.facts)), ""]
    if losses := loss_sentence(page.report):
        lines += [f"{losses}; {parity_sentence(page.parity)}", ""]
    return "\n".join(lines)


def _compared(page: RunPage) -> str:
    lines = [
        (
            escaped(line.name), str(line.predicted), str(line.measured), line.error,
            f"{_MARKS[line.passed]} {line.gate}".strip(),
        )
        for line in compared(page.report)
    ]  # fmt: skip
    header = ("quantity", "predicted", "measured", "error", "gate")
    out = ["## Predicted and measured", "", *_table(header, lines, right=(1, 2, 3)), ""]
    if page.serving:
        out += [f"Server: {escaped(page.serving)}", ""]
    return "\n".join(out)


def _parity(page: RunPage) -> str:
    out = ["## Trained = served", "", f"{parity_sentence(page.parity)}", ""]
    if page.parity is not None:
        out += [*_rows(page.parity.rows), ""]
    return "\n".join(out)


def _picture(picture: Picture) -> str:
    title = [f"## {_TITLES[picture.name]}", ""] if picture.name in _TITLES else []
    if picture.png is None:
        absent = f"{picture.name}.png is absent: matplotlib is not installed (`{INSTALL}`)."
        return "\n".join([*title, f"{absent} What it would show: {escaped(picture.alt)}", ""])
    image = f"![{escaped(picture.alt)}]({picture.name}.png)"
    return "\n".join([*title, image, "", escaped(picture.caption), ""])


def _samples(page: RunPage) -> str:
    if not page.samples:
        return ""
    lines = ["## Before and after", ""]
    for sample in page.samples:
        for name in ("prompt", "before", "after"):
            lines += [f"{name}:", *_fenced(sample[name].strip() or "(nothing)"), ""]
    return "\n".join(lines)


def _elsewhere(page: RunPage) -> str:
    report = page.elsewhere
    if report is None:
        return ""
    there = machines(report)
    out = ["## What it would cost elsewhere", "", f"{escaped(report.title)} (formula)", ""]
    if there.lines:
        cells = [
            (escaped(name), *(escaped(f"{each.value} {each.word}") for each in values))
            for name, values in there.lines
        ]
        header = ("quantity", *map(escaped, there.names))
        out += [*_table(header, cells, right=range(1, len(header))), ""]
        out += [*(f"- {escaped(name)}: {escaped(note)}" for name, note in there.notes), ""]
    if published := beside_published(report):
        cells = [
            (
                escaped(f"{group}: {line.name}" if group else line.name), str(line.formula),
                str(line.published), line.error, escaped(line.note),
            )
            for group, lines in published
            for line in lines
        ]  # fmt: skip
        header = ("quantity", "formula", "published", "error", "note")
        out += [*_table(header, cells, right=(1, 2, 3)), ""]
    out += [*(f"- {escaped(name)}: {escaped(text)}" for name, text in remarks(report)), ""]
    return "\n".join(out)


def _stages(page: RunPage) -> str:
    lines = [
        (escaped(stage.name), str(shown(stage.seconds, "s")), percent(stage.share, signed=False))
        for stage in stages(page.report)
    ]
    table = _table(("stage", "time", "share"), lines, right=(1, 2))
    return "\n".join(["## Where time went", "", *table, ""])


def _closing(page: RunPage) -> str:
    lines = ["## Serve it", ""]
    for name, command in page.commands:
        lines += [f"{escaped(name)}:", *_fenced(command), ""]
    lines += ["## Not run here", "", *(f"- {escaped(line)}" for line in page.not_run), ""]
    lines += ["## Environment", ""]
    lines += [f"- {escaped(name)}: {escaped(text)}" for name, text in page.environment.items()]
    return "\n".join([*lines, ""])


def _all(page: RunPage) -> str:
    header = ("quantity", "value", "unit", "source", "target", "gate", "note")
    lines = [
        (
            escaped(row.quantity), "unknown" if row.value is None else repr(row.value), row.unit,
            row.source, "" if row.target is None else repr(row.target), _MARKS[row.passed],
            escaped(row.note),
        )
        for row in all_rows(page)
    ]  # fmt: skip
    return "\n".join(["## All numbers", "", *_table(header, lines, right=(1, 4)), ""])


def _rows(rows: Sequence[Row]) -> Iterator[str]:
    header = ("quantity", "value", "source", "gate", "note")
    lines = [
        (
            escaped(short(row.quantity)), str(shown_row(row)), row.source,
            f"{_MARKS[row.passed]} {gate_text(row)}".strip(), escaped(row.note),
        )
        for row in rows
    ]  # fmt: skip
    yield from _table(header, lines, right=(1,))


def _table(
    header: Sequence[str], lines: Sequence[Sequence[str]], right: Sequence[int]
) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|" + "|".join("--:" if at in right else "---" for at in range(len(header))) + "|"
    for line in lines:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"


def escaped(text: object) -> str:
    """Foreign text within a line: no markup, no HTML, no line ends."""
    flat = " ".join(visible(text).split())
    return re.sub(r"([\\`*_\[\]<>#])", r"\\\1", flat)


def _fenced(text: str) -> list[str]:
    """Foreign text as it is, in a fence longer than any that it holds."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", visible(text), fence]
