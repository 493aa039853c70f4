"""What the pages of a run show, in numbers and texts: no layout, no pictures, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.pages.shown import Shown, percent, shown, shown_row
from phalanx.report import Joined, Report, Row, compare
from phalanx.trace import Trace

# Quantities that a reader looks for first, by the names that people know.
HEADLINE = {
    "training/step time": "Step time",
    "training/peak memory": "Peak memory, all processes",
    "training/all steps": "Time of all steps",
    "time/whole run": "Time of the whole run",
    "serving/KV tokens": "KV cache, tokens",
    "load/TTFT median": "Time to first token (TTFT), median",
    "load/TPOT median": "Time per output token (TPOT), median",
    "load/output tokens per second": "Output tokens per second, all requests",
}
_NAMES = HEADLINE | {
    "load/tokens per second": "Tokens per second, prompts included",
    "load/requests per second": "Requests per second",
    "load/latency median": "Latency of a request, median",
    "load/duration": "Duration of the load test",
}
_STAGES = "time/"
_REPEATED = 3  # notes that so many rows share are told once
WHOLE_RUN = "time/whole run"


@dataclass(frozen=True, kw_only=True)
class Curves:
    """What changed from step to step.

    Attributes:
        steps, losses, tokens_per_s: of each optimizer step.
        held_out: (step, loss) of each evaluation.
        predicted_tokens_per_s: before the first step; None: not predicted.
    """

    steps: Sequence[int] = ()
    losses: Sequence[float] = ()
    tokens_per_s: Sequence[float] = ()
    held_out: Sequence[Sequence[float]] = ()
    predicted_tokens_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryStack:
    """Memory of one rank.

    Attributes:
        terms: what for -> predicted bytes, at the moment of the peak.
        measured_bytes: measured peak, mean over ranks.
        limit_bytes: what a rank may use; 0: not known.
        limit_name: whose limit it is.
    """

    terms: Mapping[str, float]
    measured_bytes: float
    limit_bytes: float = 0.0
    limit_name: str = "device"


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step as simulated and as measured, both from their own time 0.

    Attributes:
        notes: what has to be known to read it.
    """

    simulated: Trace | None = None
    measured: Trace | None = None
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class RunPage:
    """A run for its readers.

    Attributes:
        title: name of the job.
        facts: short line under the title: what, where, with which versions, when.
        report: every row of the run.
        parity, elsewhere: rows of their own sections; None: not made.
        serving: the server's sentence on what it holds.
        samples: {"prompt", "before", "after"}.
        commands: (what for, command).
        not_run: sentences.
        environment: name -> version or fact.
    """

    title: str
    report: Report
    facts: Sequence[str] = ()
    parity: Report | None = None
    elsewhere: Report | None = None
    curves: Curves = field(default_factory=Curves)
    memory: MemoryStack | None = None
    timeline: Timeline | None = None
    serving: str = ""
    samples: Sequence[Mapping[str, str]] = ()
    commands: Sequence[tuple[str, str]] = ()
    not_run: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Compared:
    """A line of the table predicted | measured | error | gate.

    Attributes:
        passed: None without a gate.
    """

    name: str
    predicted: Shown
    measured: Shown
    error: str
    gate: str
    passed: bool | None
    note: str


def compared(report: Report) -> list[Compared]:
    """Quantities that were both predicted and measured, and those that people look for first."""
    joined = {each.quantity: each for each in compare([report])}
    first = [name for name in HEADLINE if name in joined]
    rest = [
        name
        for name, each in joined.items()
        if name not in HEADLINE and _predicted(each) and "measured" in each.by_source
    ]
    return [_compared(joined[name]) for name in first + rest]


def _predicted(joined: Joined) -> Row | None:
    return joined.by_source.get("formula") or joined.by_source.get("simulated")


def _compared(joined: Joined) -> Compared:
    said, seen = _predicted(joined), joined.by_source.get("measured")
    error = ""
    if said is not None and seen is not None and seen.value and said.value is not None:
        error = percent(said.value / seen.value - 1.0)
    rows = [row for row in (said, seen) if row is not None]
    return Compared(
        name=_NAMES.get(joined.quantity, joined.quantity),
        predicted=shown_row(said, rows),
        measured=shown_row(seen, rows),
        error=error,
        gate=next((gate_text(row) for row in rows if row.passed is not None), ""),
        passed=joined.passed,
        note="; ".join(dict.fromkeys(row.note for row in rows if row.note)),
    )


def gate_text(row: Row) -> str:
    """What a gate allows, in words: "±15 % of 848 ms", "≤ 7.63 nats/token"."""
    if row.target is None:
        return ""
    target = str(shown(row.target, row.unit))
    sign = {"both": "", "above": "≥ ", "below": "≤ "}[row.bound]
    slack = ""
    if row.tolerance_frac * abs(row.target) > row.tolerance:
        slack = f"±{percent(row.tolerance_frac, signed=False)}"
    elif row.tolerance:
        slack = f"±{shown(row.tolerance, row.unit)}"
    if not slack:
        return f"{sign or '= '}{target}"
    return f"{slack} of {target}" if row.bound == "both" else f"{sign}{target} {slack}"


# ---- sentences -----------------------------------------------------------------------------------


def verdict(report: Report) -> str:
    """Gates passed and missed in one line."""
    gated = [row for row in report.rows if row.passed is not None]
    missed = len(report.missed)
    if not gated:
        return "no gates were set"
    if not missed:
        return f"all {len(gated)} gates passed" if len(gated) > 1 else "the one gate passed"
    return f"{len(gated) - missed} of {len(gated)} gates passed, {missed} missed"


def missed_sentences(report: Report) -> list[str]:
    """One for each missed gate: what was found, and what would have passed."""
    lines = []
    for row in report.missed:
        found = str(shown_row(row)) if row.value is not None else f"unknown ({row.note})"
        lines.append(f"{_NAMES.get(row.quantity, row.quantity)}: {found}; gate {gate_text(row)}")
    return lines


def loss_sentence(report: Report) -> str:
    """What training did to the held-out loss; "" where none was measured."""
    before = _value(report, "training/held-out loss before")
    after = _value(report, "training/held-out loss after")
    if before is None or after is None:
        return ""
    return f"held-out loss {before:.4f} → {after:.4f} nats/token ({percent(after / before - 1.0)})"


def parity_sentence(parity: Report | None) -> str:
    """Whether what is served is what was trained."""
    if parity is None:
        return "trained = served: not compared"
    for name in ("parity", "trained = served"):
        if name in parity.notes:
            return str(parity.notes[name])
    gated = [row for row in parity.rows if row.passed is not None]
    if not gated:
        return "trained = served: not compared; " + "; ".join(_reasons(parity))
    if parity.missed:
        return f"trained ≠ served: {len(parity.missed)} of {len(gated)} comparisons missed"
    return f"trained = served: all {len(gated)} comparisons hold"


def _reasons(report: Report) -> list[str]:
    return list(dict.fromkeys(row.note for row in report.rows if row.note)) or ["no reason given"]


def _value(report: Report, quantity: str, source: str = "measured") -> float | None:
    found = (r.value for r in report.rows if (r.quantity, r.source) == (quantity, source))
    return next(found, None)


# ---- sections --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """Where time went: seconds of a stage and their share of the whole run."""

    name: str
    seconds: float
    share: float
    note: str


def stages(report: Report) -> list[Stage]:
    """The stages of a run, longest first; what no stage claims comes last."""
    rows = [r for r in report.rows if r.quantity.startswith(_STAGES) and r.source == "measured"]
    whole = next((r.value for r in rows if r.quantity == WHOLE_RUN), None)
    parts = [(r.quantity.removeprefix(_STAGES), r.value, r.note) for r in rows if r.value]
    parts = [part for part in parts if part[0] != WHOLE_RUN.removeprefix(_STAGES)]
    known = sum(seconds for _, seconds, _ in parts if seconds)
    whole = whole or known
    found = [
        Stage(name, seconds, seconds / whole, note)
        for name, seconds, note in sorted(parts, key=lambda part: -(part[1] or 0.0))
        if seconds and whole
    ]
    if whole > known > 0.0:
        rest = whole - known
        name = "everything else (starting processes, reading)"
        found.append(Stage(name, rest, rest / whole, ""))
    return found


def short(quantity: str) -> str:
    """A quantity's name without its family."""
    return quantity.split("/", 1)[-1]


@dataclass(frozen=True)
class Line:
    """A row in a table of its section: its name within its group, and what only it has to note."""

    name: str
    row: Row
    note: str


def groups(rows: Sequence[Row]) -> list[tuple[str, list[Line]]]:
    """Rows by what stands between the first and the last part of their names, in order of first
    appearance: "parity/merged/tokens" is in "merged"; names of two parts are in "", the first."""
    common, found = set(shared_notes(rows)), dict[str, list[Line]]({"": []})
    for row in rows:
        group, _, name = short(row.quantity).rpartition("/")
        note = "; ".join(part for part in row.note.split("; ") if part not in common)
        found.setdefault(group, []).append(Line(name, row, note))
    return [(group, lines) for group, lines in found.items() if lines]


def shared_notes(rows: Sequence[Row]) -> list[str]:
    """Parts of notes that several rows repeat: told once, below their table."""
    counts = Counter(part for row in rows for part in row.note.split("; ") if part)
    return [part for part, count in counts.items() if count >= _REPEATED]


def all_rows(page: RunPage) -> Iterator[Row]:
    """Every row once, in the order of the report."""
    yield from dict.fromkeys(page.report.rows)
