"""What was read from another program's file, and what of it the price does not know."""

from __future__ import annotations

from typing import Any

from phalanx.cli.output import paragraph, write
from phalanx.planner.importers import ForeignPlan, told
from phalanx.planner.importers.foreign import ASSUMED, NOT_MODELLED, NOT_PRICED, UNKNOWN


def show_file(foreign: ForeignPlan, *, explain: bool = False) -> None:
    """Keys without a counterpart, by kind; with `explain` every value with its line as well."""
    plain = [note for note in foreign.notes if note.kind == NOT_PRICED]
    read = f"{len(foreign.stated())} values read or by default"
    rest = f"; {len(plain)} keys are no part of the price" if plain else ""
    paragraph(f"{foreign.path} ({foreign.kind} {foreign.version}): {read}{rest}", hang=2)
    for kind in (UNKNOWN, ASSUMED, NOT_MODELLED):
        notes = [note for note in foreign.notes if note.kind == kind]
        if notes:
            words = "; ".join(_words(note.key, note.where, note.text) for note in notes)
            paragraph(f"{kind}: {words}", *(2, 4))
    if explain:
        write("\n")
        for what, value, where in told(foreign):
            paragraph(f"{what} = {value}" + (f"  ({where})" if where else ""), *(2, 4))


def _words(key: str, where: str, text: str) -> str:
    return f"{key}{f' ({where})' if where else ''}, {text}"


def file_table(foreign: ForeignPlan) -> dict[str, Any]:
    """For JSON: every value with its origin, and every note."""
    return {
        "program": foreign.kind,
        "version": foreign.version,
        "path": foreign.path,
        "values": {
            name: {"value": value, "from": foreign.origin.get(name, "")}
            for name, value in foreign.stated().items()
        },
        "notes": [note._asdict() for note in foreign.notes],
    }
