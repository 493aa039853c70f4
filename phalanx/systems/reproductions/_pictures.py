"""Pictures of the systems' pages, drawn from what was played or counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import JobError
from phalanx.registry import build
from phalanx.trace import Trace

_COLOURS = {"F": "#56b4e9", "B": "#e69f00", "O": "#cc79a7", "": "#999999"}


def draw_schedule(options: Mapping[str, Any], ranks: int, items: int, path: str) -> None:
    """A pipeline order."""
    from phalanx.planner.order_picture import draw_order

    draw_order(build("pipeline", options), ranks, items, path)


def draw_lanes(trace: Trace, lanes: Mapping[str, str], title: str, path: str) -> None:
    """One rank's lanes, one below the other, from a trace.

    Args:
        lanes: name of a lane in the trace -> what the picture calls it.
    """
    figure, axes = _axes(1.0 + 0.4 * len(lanes))
    for place, (lane, _) in enumerate(lanes.items()):
        rows = [row for row in trace.where(rank=0, lane=lane).rows() if row["dur_s"] > 0]
        bars = [(row["start_s"], row["dur_s"]) for row in rows]
        colours = [_COLOURS.get(row["phase"], _COLOURS[""]) for row in rows]
        axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=colours, edgecolors="white")
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_yticks(range(len(lanes)), list(lanes.values()))
    axes.set_xlabel(
        "seconds, simulated; blue forward, orange backward, pink optimizer, grey exchanges"
    )
    _save(figure, axes, title, path)


def draw_rounds(pairs: Mapping[str, Sequence[Sequence[int]]], title: str, path: str) -> None:
    """Work of each rank in each round of a ring, one panel per layout.

    Args:
        pairs: layout -> for each round the pairs of each rank.
    """
    figure, first = _axes(2.4, panels=len(pairs))
    panels = first if len(pairs) > 1 else [first]
    most = max(count for rounds in pairs.values() for each in rounds for count in each)
    for axes, (name, rounds) in zip(panels, pairs.items()):
        ranks = len(rounds[0])
        for at, each in enumerate(rounds):
            places = [at + (rank - (ranks - 1) / 2) * 0.8 / ranks for rank in range(ranks)]
            axes.bar(places, each, width=0.8 / ranks * 0.9, color="#56b4e9")
            axes.plot([at - 0.45, at + 0.45], [max(each)] * 2, color="#e69f00", linewidth=1.5)
        axes.set_ylim(0, most * 1.05)
        axes.set_xticks(
            range(len(rounds)), [f"round {at}" for at in range(len(rounds))], fontsize=8
        )
        axes.set_xlabel(f"slowest: {sum(map(max, rounds)):,} pairs", fontsize=8)
        _finish(axes, name)
    panels[0].set_ylabel("pairs of each rank")
    figure.suptitle(title, fontsize=10, x=0.12, y=1.06, ha="left")
    _write(figure, path)


def _axes(height: float, panels: int = 1) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        rule = "needs matplotlib: pip install 'phalanx-parallel[report]'"
        raise JobError("environment/missing", "--picture", None, rule) from None
    figure = Figure(figsize=(11, height))
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, panels, sharey=True)


def _save(figure: Any, axes: Any, title: str, path: str) -> None:
    _finish(axes, title)
    _write(figure, path)


def _finish(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _write(figure: Any, path: str) -> None:
    try:
        figure.savefig(Path(path), dpi=130, bbox_inches="tight")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise JobError("cli/file", "--picture", path, f"cannot be written: {reason}") from error
