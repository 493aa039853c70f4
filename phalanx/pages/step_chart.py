"""One step, simulated above measured, on one axis of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.pages import strips
from phalanx.pages.canvas import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, Theme, new_axes
from phalanx.pages.content import Timeline
from phalanx.pages.shown import shown
from phalanx.trace import Trace

KIND_COLOURS = {
    strips.PRODUCTS: BLUE,
    strips.ATTENTION: ORANGE,
    strips.ELEMENTWISE: SKY,
    strips.ENDS: GREEN,
    strips.OPTIMIZER: PINK,
    strips.COPIES: GREY,
    strips.COMMUNICATION: RED,
    strips.FORWARD: SKY,
    strips.BACKWARD: BLUE,
}
_MOMENTS = 900  # a step is drawn by so many columns
_MOST_RANKS = 4


def step_chart(timeline: Timeline, theme: Theme) -> Any:
    traces = [t for t in (timeline.simulated, timeline.measured) if t is not None]
    end_s = max(trace.end_s for trace in traces)
    operators = all(strips.has_operators(trace) for trace in traces)
    ranks = [_ranks(trace) for trace in traces]
    height = 0.9 + sum(0.32 + 0.55 * len(each) for each in ranks)
    figure, axes = new_axes(theme, 9.2, height)
    unit = shown(end_s, "s").unit
    scale = {"min": 60.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6}.get(unit, 1.0)
    at, ticks, names = 0.0, [], []
    for trace, chosen in zip(traces, ranks):
        axes.text(
            0, at - 0.2, f"{trace.source}: {shown(trace.end_s, 's')}", color=theme.ink,
            fontsize=10, fontweight="bold", va="bottom",
        )  # fmt: skip
        for rank in chosen:
            found = strips.strips_of(trace, rank, _MOMENTS, end_s, operators=operators)
            _draw_rank(axes, found, at, scale, theme)
            ticks.append(at + 0.45)
            names.append(f"rank {rank}")
            at += 1.25
        axes.plot([trace.end_s / scale] * 2, [at - 1.25 * len(chosen) - 0.1, at - 0.3],
                  color=theme.ink, lw=1.2)  # fmt: skip
        at += 0.75
    axes.set_yticks(ticks, names, color=theme.ink)
    axes.set_ylim(at - 0.9, -0.7)
    axes.set_xlim(0, end_s / scale * 1.005)
    axes.set_xlabel(f"{unit} from the start of the step")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    _legend(figure, traces, operators=operators, theme=theme)
    return figure


def _ranks(trace: Trace) -> list[int]:
    found = sorted(set(trace.columns["rank"].tolist()))
    return found[:_MOST_RANKS]


def ranks_note(timeline: Timeline) -> str:
    """How many ranks are drawn, where it is not all of them."""
    traces = [t for t in (timeline.simulated, timeline.measured) if t is not None]
    most = max(len(set(trace.columns["rank"].tolist())) for trace in traces)
    return f"{_MOST_RANKS} of {most} ranks are drawn." if most > _MOST_RANKS else ""


def _draw_rank(axes: Any, found: strips.RankStrips, at: float, scale: float, theme: Theme) -> None:
    """Passes as a thin line on top, then operators, then communication."""
    places = {"passes": (0.0, 0.12), "operators": (0.16, 0.52), "communication": (0.72, 0.24)}
    if len(found.strips) == 2:  # no operators: the passes take their place
        places["passes"] = (0.0, 0.68)
    for strip in found.strips:
        top, height = places[strip.name]
        thin = strip.name == "passes" and height < 0.2
        by_colour: dict[str, list[tuple[float, float]]] = {}
        for kind, start_s, stop_s in strip.runs:
            colour = _pass_colour(kind, theme) if thin else KIND_COLOURS[kind]
            by_colour.setdefault(colour, []).append((start_s / scale, stop_s / scale))
        for colour, runs in by_colour.items():
            axes.add_patch(_boxes(runs, at + top, height, colour))


def _pass_colour(kind: str, theme: Theme) -> str:
    return {strips.FORWARD: theme.rule, strips.BACKWARD: theme.muted}.get(kind, PINK)


def _boxes(runs: Sequence[tuple[float, float]], top: float, height: float, colour: str) -> Any:
    """All boxes of one colour as one path: a page with thousands of them stays small."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    points, codes = [], []
    for left, right in runs:
        points += [(left, top), (right, top), (right, top + height), (left, top + height)]
        points.append((left, top))
        codes += [Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY]
    return PathPatch(Path(points, codes), facecolor=colour, edgecolor="none", lw=0)


def _legend(figure: Any, traces: Sequence[Any], *, operators: bool, theme: Theme) -> None:
    from matplotlib.patches import Patch

    kinds: Sequence[str] = strips.PASSES
    if operators:
        shown_kinds = {
            kind for trace in traces for kind in strips.seconds_by_kind(trace, _ranks(trace)[0])
        }
        kinds = [kind for kind in strips.KINDS if kind in shown_kinds]
    handles = [Patch(color=KIND_COLOURS[kind], label=kind) for kind in kinds]
    if operators:
        handles.append(Patch(color=theme.rule, label="line above: forward"))
        handles.append(Patch(color=theme.muted, label="backward"))
    figure.legend(
        handles=handles, loc="outside lower left", ncols=5, labelcolor=theme.ink, fontsize=8.5
    )


def step_alt(timeline: Timeline) -> str:
    parts = []
    for trace in (timeline.simulated, timeline.measured):
        if trace is None:
            continue
        told = f"{trace.source} step: {shown(trace.end_s, 's')}"
        if strips.has_operators(trace):
            rank = _ranks(trace)[0]
            seconds: Mapping[str, float] = strips.seconds_by_kind(trace, rank)
            told += f", rank {rank}: " + ", ".join(
                f"{kind} {shown(value, 's')}" for kind, value in seconds.items()
            )
        parts.append(told)
    return "; ".join(parts) + "."
