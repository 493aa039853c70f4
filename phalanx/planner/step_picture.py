"""A simulated step as a picture: when each pipeline rank computes what, in text or as PNG or SVG.

One rank stands for all that share its place in the pipeline. No torch; matplotlib (the `report`
extra) is imported where a file is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.errors import JobError
from phalanx.mesh import Mesh
from phalanx.policy import Step
from phalanx.trace import Trace
from phalanx.units import format_s
from phalanx.worlds.pipeline_arrays import Played

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_WEIGHTS = "ABCDEFGHIJKLMNPQRSTUVWXYZ"  # O is the optimizer
# Okabe and Ito's colours, which people with any kind of colour vision can tell apart
_COLOURS = {"F": "#56b4e9", "B": "#e69f00", "I": "#e69f00", "W": "#009e73", "O": "#cc79a7"}
_NAMES = {
    "F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient",
    "O": "optimizer",
}  # fmt: skip
_MOST_LABELS = 400  # more numbers than this are unreadable
_PALEST = 0.45  # colour of the first of a rank's chunks, as a share of that of the last


class PassSpan(NamedTuple):
    """A pass of one chunk of the model and one micro-batch, or the optimizer.

    Attributes:
        place: on the pipeline axis.
        name: "2F0", or "O".
        phase: "F", "B", "I", "W" or "O".
        item: micro-batch (-1: none).
        start_s, end_s: from its first operator to its last, waiting between them included.
    """

    place: int
    name: str
    phase: str
    item: int
    start_s: float
    end_s: float


def pass_spans(trace: Trace, mesh: Mesh, axis: str = "pp") -> list[PassSpan]:
    """The passes of the lowest rank played at each place of the pipeline, in order of time."""
    ranks: dict[int, int] = {}
    for rank in sorted(set(trace.columns["rank"].tolist())):
        ranks.setdefault(mesh.coordinate(rank, axis) if axis in mesh.names else 0, rank)
    spans = [span for place, rank in ranks.items() for span in _of_rank(trace, place, rank)]
    return sorted(spans, key=lambda span: (span.place, span.start_s))


def _of_rank(trace: Trace, place: int, rank: int) -> Iterator[PassSpan]:
    found: dict[str, PassSpan] = {}
    for row in trace.where(rank=rank, lane="compute").rows():
        name = row["action_id"].partition("/")[0]
        if row["phase"] not in _COLOURS:
            continue
        start_s, end_s = row["start_s"], row["start_s"] + row["dur_s"]
        before = found.get(name)
        if before is not None:
            start_s, end_s = min(start_s, before.start_s), max(end_s, before.end_s)
        found[name] = PassSpan(place, name, row["phase"], row["item"], start_s, end_s)
    yield from found.values()


def played_spans(played: Played) -> list[PassSpan]:
    """The passes of a schedule that `pipeline_arrays` has played, of its first replica."""
    times = zip(played.wired.rows, played.start_s[:, 0].tolist(), played.end_s[:, 0].tolist())
    spans = [
        PassSpan(row.rank, str(row.step), row.step.kind, row.step.item, start_s, end_s)
        for row, start_s, end_s in times
    ]
    return sorted(spans, key=lambda span: (span.place, span.start_s))


def timeline_text(spans: Sequence[PassSpan], width: int = 91, most_places: int = 16) -> str:
    """The step in `width` equal moments, a line per place, as many as fit.

    A digit is the forward pass of a micro-batch (its last digit), a letter a backward pass or input
    gradient (a: 0, b: 1 ...), a capital a weight gradient (without O), O the optimizer, a point is
    waiting.
    """
    if not spans:
        return ""
    end_s = max(span.end_s for span in spans)
    places = sorted({span.place for span in spans})
    lines = []
    for place in places[:most_places]:
        cells = ["."] * width
        for span in spans:
            if span.place == place and end_s > 0:
                first = int(span.start_s / end_s * width)
                last = max(first + 1, int(span.end_s / end_s * width))
                cells[first:last] = [_sign(span)] * (min(last, width) - first)
        lines.append(f"rank {place:<3} {''.join(cells)}")
    if len(places) > most_places:
        lines.append(f"({len(places) - most_places} more ranks not shown)")
    weights = ", A-Z weight gradient" if any(span.phase == "W" for span in spans) else ""
    legend = f"0-9 forward, a-z backward of a micro-batch{weights}, O optimizer, . waiting"
    return "\n".join([*lines, f"         0 s to {format_s(end_s)}: {legend}"])


def _sign(span: PassSpan) -> str:
    if span.phase == "F":
        return str(span.item % 10)
    if span.phase == "O":
        return "O"
    letters = _WEIGHTS if span.phase == "W" else _LETTERS
    return letters[span.item % len(letters)]


def draw_step(
    spans: Sequence[PassSpan], title: str, path: str, unit: str = "seconds, simulated"
) -> None:
    """Write the picture; the ending of `path` says in which form (.png, .svg, .pdf).

    Args:
        spans: what is drawn.
        title, path: of the picture.
        unit: what the numbers along it are.

    Raises:
        JobError: `environment/missing` without matplotlib; `cli/file` when it cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        rule = "needs matplotlib: pip install 'phalanx-parallel[report]'"
        raise JobError("environment/missing", "--picture", path, rule) from None
    places = sorted({span.place for span in spans})
    figure = Figure(figsize=(11, 1.4 + 0.32 * len(places)))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place in places:
        own = [span for span in spans if span.place == place]
        bars = [(span.start_s, span.end_s - span.start_s) for span in own]
        axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=_shades(own), edgecolors="white",
                         linewidth=0.3)  # fmt: skip
    if len(spans) <= _MOST_LABELS:
        _number(axes, spans)
    axes.set_ylim(max(places) + 0.6, min(places) - 0.6)
    axes.set_yticks(places, [f"rank {place}" for place in places])
    axes.set_xlim(0, max(span.end_s for span in spans))
    several = any(len(set(_shades([s for s in spans if s.place == p and s.phase == "F"]))) > 1
                  for p in places)  # fmt: skip
    note = "; the paler, the earlier a rank's chunk is in the model" if several else ""
    axes.set_xlabel(unit + note)
    axes.set_title(title, fontsize=10, loc="left")
    shown = {span.phase for span in spans}
    handles = [Patch(color=_COLOURS[p], label=_NAMES[p]) for p in _COLOURS if p in shown]
    axes.legend(handles=handles, loc="upper right", bbox_to_anchor=(1, 1.0 + 0.6 / len(places)),
                ncols=len(handles), fontsize=8, frameon=False)  # fmt: skip
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    try:
        figure.savefig(Path(path), dpi=130, bbox_inches="tight")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise JobError("cli/file", "--picture", path, f"cannot be written: {reason}") from error


def _shades(spans: Sequence[PassSpan]) -> list[tuple[float, ...]]:
    """A colour per span of one rank: that of its phase, paler for earlier chunks of the model."""
    steps = [Step.parse(span.name) for span in spans]
    stages = sorted({step.stage for step in steps if step is not None})
    strength = {stage: _PALEST + (1 - _PALEST) * (at + 1) / len(stages)
                for at, stage in enumerate(stages)}  # fmt: skip
    return [
        _on_white(_COLOURS[span.phase], 1.0 if step is None else strength[step.stage])
        for span, step in zip(spans, steps)
    ]


def _on_white(colour: str, share: float) -> tuple[float, ...]:
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return tuple(round(1 - share * (1 - part), 3) for part in parts)


def _number(axes: Any, spans: Sequence[PassSpan]) -> None:
    end_s = max(span.end_s for span in spans)
    for span in spans:
        if span.item >= 0 and span.end_s - span.start_s > 0.008 * end_s:
            middle_s = (span.start_s + span.end_s) / 2
            axes.text(middle_s, span.place, str(span.item), ha="center", va="center", fontsize=6)
