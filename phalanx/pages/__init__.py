"""Pages that people read: the report of a run as one HTML file, as Markdown, and in the terminal.

    page = RunPage(title=..., report=..., ...)     what there is to show
    write_pages(page, folder)                      report.html, report.md and its pictures
    terminal(report)                               the lines that a run ends with

The HTML needs no network and no script. No torch here; pictures need matplotlib (the `report`
extra), and without it both pages say in words what they would show.
"""

from __future__ import annotations

from phalanx.pages.content import Curves, MemoryStack, RunPage, Timeline
from phalanx.pages.html import render_html
from phalanx.pages.lines import terminal
from phalanx.pages.markdown import render_markdown
from phalanx.pages.write import write_pages

__all__ = [
    "Curves",
    "MemoryStack",
    "RunPage",
    "Timeline",
    "render_html",
    "render_markdown",
    "terminal",
    "write_pages",
]
