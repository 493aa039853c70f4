"""What pictures are drawn on: colours, axes, and one drawing as SVG for pages and as PNG.

The neutral colours of an SVG are CSS variables, so that it follows its page into the dark. Colours
of data are those of Okabe and Ito (Color Universal Design, 2008), which people with any kind of
colour vision can tell apart. matplotlib (the `report` extra) is imported where it is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO, StringIO
from typing import Any

from markupsafe import escape

BLUE, ORANGE, SKY, GREEN = "#0072b2", "#e69f00", "#56b4e9", "#009e73"
RED, PINK, GREY = "#d55e00", "#cc79a7", "#9a9a9a"


@dataclass(frozen=True)
class Theme:
    """Neutral colours of a picture."""

    ink: str
    muted: str
    rule: str
    paper: str


# Colours that stand for CSS variables until the SVG is written; no data has them.
_VARIABLES = Theme("#010203", "#040506", "#070809", "#0a0b0c")
_WHITE = Theme("#1b1f24", "#5b6570", "#d8dde3", "#ffffff")


@dataclass(frozen=True)
class Picture:
    """A picture with what it says in words.

    Attributes:
        name: of its file, without ".png".
        alt: what somebody who cannot see it needs to know.
        caption: stands below it.
        svg, png: None where matplotlib is not installed.
    """

    name: str
    alt: str
    caption: str
    svg: str | None = None
    png: bytes | None = None


def picture(name: str, alt: str, caption: str, draw: Callable[[Theme], Any]) -> Picture:
    """Draw in both forms; only the texts where matplotlib is not installed.

    Args:
        draw: theme -> figure.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        return Picture(name, alt, caption)
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.family": "sans-serif",
        "font.size": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.8,
        "xtick.major.width": 0.8,
        "ytick.major.width": 0.8,
        "legend.frameon": False,
        "legend.handlelength": 1.2,
        "path.simplify": True,
    }
    with matplotlib.rc_context(settings):
        svg, png = StringIO(), BytesIO()
        draw(_VARIABLES).savefig(svg, format="svg", transparent=True, metadata={"Date": None})
        draw(_WHITE).savefig(png, format="png", dpi=160, facecolor=_WHITE.paper)
    return Picture(name, alt, caption, inline_svg(svg.getvalue(), name, alt), png.getvalue())


def inline_svg(text: str, name: str, alt: str) -> str:
    """An SVG file as an element of a page: no head, ids of its own, colours of the page.

    Args:
        name: made part of every id, so that several pictures stand on one page.
    """
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', text)
    for variable in ("ink", "muted", "rule", "paper"):
        text = text.replace(getattr(_VARIABLES, variable), f"var(--{variable})")
    text = text.replace(BLUE, "var(--blue)")  # too dark for a dark page
    view = re.search(r'viewBox="[^"]+"', text)
    body = text[text.index(">", text.index("<svg")) + 1 :]
    head = f'<svg class="plot" role="img" aria-label="{escape(alt)}" {view[0] if view else ""}'
    links = 'xmlns:xlink="http://www.w3.org/1999/xlink" xmlns="http://www.w3.org/2000/svg"'
    return re.sub(r"\s*\n\s*", "\n", f"{head} {links}>{body}").strip()


def new_axes(theme: Theme, width: float, height: float) -> tuple[Any, Any]:
    """A figure of so many inches with one pair of axes in the theme's colours."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_facecolor("none")
    for spine in axes.spines.values():
        spine.set_color(theme.rule)
    axes.tick_params(colors=theme.muted, length=3)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(theme.muted)
    return figure, axes
