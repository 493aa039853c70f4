"""The page of a run as one HTML file: pictures inline, no network, no script."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from phalanx.pages.canvas import Picture
from phalanx.pages.content import (
    RunPage,
    all_rows,
    compared,
    gate_text,
    groups,
    loss_sentence,
    missed_sentences,
    parity_sentence,
    shared_notes,
    stages,
    verdict,
)
from phalanx.pages.prices import beside_published, machines, remarks
from phalanx.pages.shown import percent, shown, shown_row, visible
from phalanx.report import Report

_HERE = Path(__file__).parent
INSTALL = "pip install 'phalanx-parallel[report]'"


def render_html(page: RunPage, pictures: Sequence[Picture]) -> str:
    """The whole file.

    Args:
        pictures: from `pictures.pictures`; those without an SVG are told in words.
    """
    return _template().render(
        page=page,
        report=page.report,
        pictures={each.name: each for each in pictures},
        rows=list(all_rows(page)),
        compared=compared(page.report),
        missed=missed_sentences(page.report),
        verdict=verdict(page.report),
        losses=loss_sentence(page.report),
        parity_verdict=parity_sentence(page.parity),
        stages=stages(page.report),
        prices=_Prices(page.elsewhere) if page.elsewhere is not None else None,
        style=Markup((_HERE / "run.css").read_text(encoding="utf-8")),
        install=INSTALL,
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalised,
    )
    environment.filters |= {
        "shown": shown,
        "shown_row": shown_row,
        "groups": groups,
        "shared_notes": shared_notes,
        "gate": gate_text,
        "visible": visible,
        "percent": percent,
        "inline": _inline,
    }
    return environment.get_template("run.html.j2")


class _Prices:
    """The tables of the section on other machines."""

    def __init__(self, report: Report) -> None:
        self.title, self.machines = report.title, machines(report)
        self.published, self.remarks = beside_published(report), remarks(report)


def _finalised(value: object) -> object:
    """Whatever is printed is made visible first, also in attributes."""
    return value if isinstance(value, Markup) else visible(value)


def _inline(picture: Picture) -> Markup:
    return Markup(picture.svg or "")
