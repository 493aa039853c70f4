"""The files of a run's pages."""

from __future__ import annotations

from pathlib import Path

from phalanx.pages.content import RunPage
from phalanx.pages.html import render_html
from phalanx.pages.markdown import render_markdown
from phalanx.pages.pictures import pictures


def write_pages(page: RunPage, folder: str | Path) -> list[str]:
    """Write report.html, report.md and a PNG per picture; returns their names.

    Without matplotlib there are no PNGs, and both pages say so.
    """
    drawn, target = pictures(page), Path(folder)
    names = ["report.html", "report.md"]
    (target / "report.html").write_text(render_html(page, drawn), encoding="utf-8")
    (target / "report.md").write_text(render_markdown(page, drawn), encoding="utf-8")
    for picture in drawn:
        if picture.png is not None:
            (target / f"{picture.name}.png").write_bytes(picture.png)
            names.append(f"{picture.name}.png")
    return names
