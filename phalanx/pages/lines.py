"""The lines that a run ends with in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from phalanx.pages.content import compared, loss_sentence, missed_sentences, verdict
from phalanx.pages.prices import price_lines
from phalanx.pages.shown import visible
from phalanx.report import Report

_SAMPLES, _SAMPLE_CHARS = 3, 160


def terminal(report: Report) -> list[str]:
    """What was predicted and what happened; samples, commands, and what was not run.

    Args:
        report: of a run; its notes hold "parity", "samples", "serving", "commands" and "not run".
    """
    lines = [report.title, ""]
    table = [("", "predicted", "measured", "error", "gate")]
    for line in compared(report):
        gate = {None: "", True: "pass", False: "MISS"}[line.passed]
        told = f"{gate} {line.gate}".strip()
        table.append((line.name, str(line.predicted), str(line.measured), line.error, told))
    lines += [*_aligned(table), ""]
    notes = report.notes
    lines += [visible(notes[name]) for name in ("parity", "serving") if notes.get(name)]
    if losses := loss_sentence(report):
        lines.append(losses)
    lines += ["", *_samples(notes.get("samples", ()))]
    lines += [f"{notes.get('elsewhere', 'elsewhere')}: {line}" for line in price_lines(report)]
    for name, command in notes.get("commands", ()):
        lines += _command(name, command)
    lines += [f"not run here: {line}" for line in notes.get("not run", ())]
    lines += ["", verdict(report), *(f"missed: {line}" for line in missed_sentences(report))]
    return lines


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Columns of numbers stand right, names and gates left."""
    widths = [max(map(len, column)) for column in zip(*table)]
    right = (False, True, True, True, False)
    return [
        "  ".join(
            cell.rjust(width) if at_right else cell.ljust(width)
            for cell, width, at_right in zip(line, widths, right)
        ).rstrip()
        for line in table
    ]


def _samples(samples: Iterable[dict[str, str]]) -> list[str]:
    lines = []
    for sample in list(samples)[:_SAMPLES]:
        lines.append(f"prompt: {_one_line(sample['prompt'])}")
        lines.append(f"before: {_one_line(sample['before'])}")
        lines += [f"after:  {_one_line(sample['after'])}", ""]
    return lines


def _command(name: str, command: str) -> list[str]:
    """A command after its name; of several lines, the others stand below the first."""
    first, *rest = command.splitlines()
    return [f"{name}: {first}", *(f"{'':{len(name) + 2}}{line}" for line in rest)]


def _one_line(text: str) -> str:
    flat = visible(" ".join(text.split()))
    if not flat:
        return "(nothing)"
    return flat if len(flat) <= _SAMPLE_CHARS else flat[: _SAMPLE_CHARS - 1] + "…"
