"""A step as strips of colour: which kind of work fills each moment of each rank. No pictures here.

Simulated and measured operators have different names (ours and ATen's); both fall into the same few
kinds. Where a trace holds no operators, its passes are the kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from phalanx.trace import Trace

PRODUCTS, ATTENTION, ELEMENTWISE = "matrix products", "attention", "norms, gates, sums"
ENDS, OPTIMIZER, COMMUNICATION = "embedding, head, loss", "optimizer", "communication"
COPIES, FORWARD, BACKWARD = "copies", "forward", "backward"
KINDS = (PRODUCTS, ATTENTION, ELEMENTWISE, ENDS, OPTIMIZER, COPIES, COMMUNICATION)
PASSES = (FORWARD, BACKWARD, OPTIMIZER, COMMUNICATION)
_OF_PASS = {"F": FORWARD, "B": BACKWARD, "O": OPTIMIZER}

# Operators as planned; measured ones are our autograd functions and ATen's operators. The first
# pattern that fits counts.
_SIMULATED = (
    ("linear", PRODUCTS), ("experts", PRODUCTS), ("attention", ATTENTION), ("head", ENDS),
    ("embedding", ENDS), ("optimizer", OPTIMIZER), ("*", ELEMENTWISE),
)  # fmt: skip
OWN_FUNCTIONS = (
    ("_*attention*", ATTENTION), ("_rms*", ELEMENTWISE), ("_gate*", ELEMENTWISE),
    ("_rotate*", ELEMENTWISE), ("_frozenpluslowrank*", PRODUCTS), ("_crossentropy*", ENDS),
    ("_exchange*", COMMUNICATION), ("_enter*", COMMUNICATION), ("_leave*", COMMUNICATION),
    ("_wait*", COMMUNICATION), ("_join*", COMMUNICATION), ("_toheads*", COMMUNICATION),
    ("_totokens*", COMMUNICATION), ("_product*", PRODUCTS), ("_weight*", PRODUCTS),
)  # fmt: skip
_INSIDE_LAYERS = (
    *OWN_FUNCTIONS,
    ("*nccl*", COMMUNICATION), ("*nvjet*", PRODUCTS), ("*cutlass*", PRODUCTS),
    ("*embedding*", ENDS),
    ("*scaled_dot_product*", ATTENTION), ("*flash*", ATTENTION), ("*attention*", ATTENTION),
    ("*softmax*", ATTENTION), ("*bmm", ATTENTION), ("*::matmul", ATTENTION),
    ("*masked_fill*", ATTENTION), ("*logsumexp*", ATTENTION),
    ("*::linear*", PRODUCTS), ("*mm", PRODUCTS), ("*mm_*", PRODUCTS), ("*gemm*", PRODUCTS),
    ("*copy*", COPIES), ("*::to", COPIES), ("*::_to*", COPIES), ("*::cat", COPIES),
    ("*zero*", COPIES), ("*empty*", COPIES), ("*clone", COPIES), ("*contiguous", COPIES),
    ("*split_with_sizes*", COPIES), ("*chunk*", COPIES), ("*stack", COPIES), ("*emcpy*", COPIES),
    ("*", ELEMENTWISE),
)  # fmt: skip
_OUTSIDE = (
    *OWN_FUNCTIONS,
    ("*softmax*", ENDS), ("*matmul", ENDS), ("*bmm", ENDS), ("*::linear*", ENDS), ("*mm", ENDS),
    ("*logsumexp*", ENDS), ("*gather", ENDS), ("*exp*", ENDS), ("*tanh*", ENDS),
    ("*index*", ENDS),
)  # fmt: skip


@dataclass(frozen=True)
class Strip:
    """One line of a rank.

    Attributes:
        name: "passes", "operators" or "communication".
        runs: (kind, first moment, last moment) in seconds, in order of time.
    """

    name: str
    runs: Sequence[tuple[str, float, float]]


@dataclass(frozen=True)
class RankStrips:
    """What one rank did in the step."""

    rank: int
    strips: Sequence[Strip]


def one_step(trace: Trace) -> Trace | None:
    """The step of a measured trace to look at: one with operators, else the most typical one.

    Every rank counts from its own start of the step, since clocks of ranks have different origins;
    they leave the step before together. None for a trace without steps.
    """
    steps = trace.where(lane="step")
    if not len(steps):
        return None
    number = _typical(trace, steps)
    chosen = trace.where(step=number)
    start_s = dict(
        zip(*(chosen.where(lane="step").columns[name].tolist() for name in ("rank", "start_s")))
    )
    columns = dict(chosen.columns)
    begins = np.asarray([start_s.get(rank, 0.0) for rank in columns["rank"].tolist()])
    columns["start_s"] = columns["start_s"] - begins
    return Trace(trace.source, trace.job, columns, trace.vocabulary, trace.notes)


def _typical(trace: Trace, steps: Trace) -> int:
    numbers, counts = np.unique(trace.columns["step"], return_counts=True)
    if counts.max() > 4 * np.median(counts):  # operators of that one were recorded
        return int(numbers[counts.argmax()])
    of_first = steps.where(rank=int(steps.columns["rank"][0]))
    numbers, seconds = of_first.columns["step"], of_first.columns["dur_s"]
    if len(numbers) > 1:  # the first one warms up
        numbers, seconds = numbers[1:], seconds[1:]
    return int(numbers[np.abs(seconds - np.median(seconds)).argmin()])


def has_operators(trace: Trace) -> bool:
    """Whether operators were recorded, and not only passes."""
    return any(_holds_operators(lane) for lane in np.unique(trace.column("lane")).tolist())


def _holds_operators(lane: str) -> bool:
    return lane == "operators" or lane.startswith(("thread", "stream"))


class _Spans(NamedTuple):
    """When something ran, and what kind of work it was."""

    start_s: np.ndarray
    dur_s: np.ndarray
    kinds: np.ndarray


def strips_of(
    trace: Trace, rank: int, columns: int, end_s: float, *, operators: bool
) -> RankStrips:
    """The strips of a rank on an axis of `columns` moments from 0 to `end_s`.

    Args:
        operators: by kinds of operator; otherwise by passes.
    """
    rows = trace.where(rank=rank)
    strips = [Strip("passes", _runs_of_passes(rows))]
    if operators:
        strips.append(Strip("operators", _runs(_operators(rows), columns, end_s)))
    strips.append(Strip("communication", _runs(_communication(rows), columns, end_s)))
    return RankStrips(rank, strips)


def seconds_by_kind(trace: Trace, rank: int) -> Mapping[str, float]:
    """Kind of work -> seconds of a rank in the step; collectives run beside the others."""
    rows = trace.where(rank=rank)
    seconds: dict[str, float] = {}
    for spans in (_operators(rows), _communication(rows)):
        for kind in KINDS:
            if (spans.kinds == kind).any():
                seconds[kind] = float(spans.dur_s[spans.kinds == kind].sum())
    return seconds


def _runs_of_passes(rows: Trace) -> list[tuple[str, float, float]]:
    return [
        (_OF_PASS[row["phase"]], row["start_s"], row["start_s"] + row["dur_s"])
        for row in rows.where(lane="compute").rows()
        if row["phase"] in _OF_PASS
    ]


def _communication(rows: Trace) -> _Spans:
    """Exchanges as their receivers see them.

    A measured send lasts until somebody asks for it, long after its bytes have left; how long an
    exchange held a rank up is a part of it that has a row of its own.
    """
    talk = rows.select(rows.column("axis") != "")
    if rows.source == "measured":
        talk = talk.select(~np.isin(talk.column("operator"), ("send", "wait")))
    kinds = np.full(len(talk), COMMUNICATION, dtype=object)
    return _Spans(talk.columns["start_s"], talk.columns["dur_s"], kinds)


def _operators(rows: Trace) -> _Spans:
    """Operators with their kinds. A measured update counts as a whole: its kernels are our own and
    no profiler lists them."""
    lanes = rows.column("lane")
    chosen = rows.select(np.isin(lanes, _computing_lanes(rows, lanes)))
    spans = _Spans(chosen.columns["start_s"], chosen.columns["dur_s"], _kinds(chosen))
    if rows.source == "simulated":
        return spans
    for update in rows.where(lane="compute", phase="O").rows():
        start_s, dur_s = update["start_s"], update["dur_s"]
        outside = (spans.start_s < start_s) | (spans.start_s >= start_s + dur_s)
        kept = _Spans(*(values[outside] for values in spans))
        spans = _Spans(
            np.append(kept.start_s, start_s),
            np.append(kept.dur_s, dur_s),
            np.append(kept.kinds, np.asarray([OPTIMIZER], dtype=object)),
        )
    return spans


def _computing_lanes(rows: Trace, lanes: np.ndarray) -> list[str]:
    """Streams of a device, else the threads that work on the model: others serve collectives."""
    names = [lane for lane in np.unique(lanes).tolist() if _holds_operators(lane)]
    streams = [lane for lane in names if not lane.startswith("thread")]
    if streams:
        return streams
    in_model = rows.column("layer") != ""
    return [lane for lane in names if bool(in_model[lanes == lane].any())]


def _kinds(rows: Trace) -> np.ndarray:
    operators, layers = rows.column("operator"), rows.column("layer")
    if rows.source == "simulated":
        known = {name: _first(_SIMULATED, name) for name in set(operators.tolist())}
        return np.asarray([known[name] for name in operators.tolist()], dtype=object)
    inside = {name: _first(_INSIDE_LAYERS, name) for name in set(operators.tolist())}
    outside = {name: _first((*_OUTSIDE, *_INSIDE_LAYERS), name) for name in inside}
    # kernels of a device carry no layer
    known = (layers != "") | np.char.startswith(rows.column("lane").astype(str), "stream")
    kinds = [
        (inside if is_inside else outside)[name]
        for name, is_inside in zip(operators.tolist(), known.tolist())
    ]
    return np.asarray(kinds, dtype=object)


def _first(table: Sequence[tuple[str, str]], name: str) -> str:
    return next(kind for pattern, kind in table if fnmatchcase(name.lower(), pattern))


def _runs(spans: _Spans, columns: int, end_s: float) -> list[tuple[str, float, float]]:
    """Runs of moments in which one kind prevails; moments that are mostly idle stay empty."""
    if not len(spans.kinds) or end_s <= 0:
        return []
    start = spans.start_s / end_s * columns
    stop = start + spans.dur_s / end_s * columns
    names = [kind for kind in KINDS if (spans.kinds == kind).any()]
    share = np.stack(
        [_coverage(start[spans.kinds == n], stop[spans.kinds == n], columns) for n in names]
    )
    busiest = np.where(share.sum(axis=0) >= 0.5, share.argmax(axis=0), -1)
    edges = np.flatnonzero(np.diff(busiest)) + 1
    width = end_s / columns
    return [
        (names[busiest[a]], a * width, b * width)
        for a, b in pairwise([0, *edges.tolist(), columns])
        if busiest[a] >= 0
    ]


def _coverage(start: np.ndarray, stop: np.ndarray, columns: int) -> np.ndarray:
    """Share of each moment that these spans cover (of overlapping ones, the sum)."""
    grid = np.arange(columns + 1, dtype=np.float64)
    begun, ended = np.sort(start), np.sort(stop)
    # time spent in spans before x: sum over spans of max(0, x - start) - max(0, x - stop)
    return np.diff(_before(begun, grid) - _before(ended, grid))


def _before(moments: np.ndarray, grid: np.ndarray) -> np.ndarray:
    count = np.searchsorted(moments, grid)
    total = np.concatenate([[0.0], np.cumsum(moments)])
    return count * grid - total[count]
