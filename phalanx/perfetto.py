"""Traces as files that ui.perfetto.dev and chrome://tracing open.

Format: the JSON array form of the Chrome trace event format (processes, threads, complete events
"X", instants "i", flow arrows "s" to "f", counters "C"). A process is a rank, a thread a lane;
arrows lead from a send to its receive; the counter is what Alloc and Free say of device memory.
Several traces share one time axis: each rank then has one process per trace, next to each other.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.trace import Trace

_US = 1e6  # the format counts microseconds
# Shown beside a slice, except where empty.
_EMPTY: dict[str, object] = dict.fromkeys(("operator", "layer", "phase", "axis"), "")
_EMPTY |= {"step": None, "item": -1, "peer": -1}
_EMPTY |= dict.fromkeys(("payload_bytes", "wire_bytes", "flops"), 0.0)

TraceEvent = dict[str, Any]


def trace_events(traces: Sequence[Trace]) -> Iterator[TraceEvent]:
    """The events of all traces on one axis, metadata first within each rank.

    Args:
        traces: simulated or measured, each from its own time 0.
    """
    for number, trace in enumerate(traces):
        arrows = _Arrows(number)
        # One process id per rank and trace.
        pid_of = partial(_process_id, len(traces), number)
        lanes: dict[int, dict[str, int]] = {}
        for row in trace.rows():
            rank = row["rank"]
            pid = pid_of(rank)
            if rank not in lanes:
                lanes[rank] = {}
                yield from _process(pid, rank, trace)
            tid = lanes[rank].get(row["lane"])
            if tid is None:
                tid = lanes[rank][row["lane"]] = len(lanes[rank])
                yield from _thread(pid, tid, row["lane"])
            place = {"pid": pid, "tid": tid, "ts": row["start_s"] * _US}
            yield _slice(row, place)
            yield from arrows.of(row, place)
        yield from _memory(trace, pid_of)


def _process_id(num_traces: int, number: int, rank: int) -> int:
    return rank * num_traces + number


def _memory(trace: Trace, pid_of: Callable[[int], int]) -> Iterator[TraceEvent]:
    """Bytes of device memory over time; rows stand in order of issue, so sort by time first."""
    operators = trace.column("operator")
    chosen = np.flatnonzero((operators == "alloc") | (operators == "free"))
    start_s = trace.columns["start_s"]
    used_bytes: dict[int, float] = {}
    for at in chosen[np.argsort(start_s[chosen], kind="stable")].tolist():
        rank, num_bytes = int(trace.columns["rank"][at]), float(trace.columns["payload_bytes"][at])
        sign = 1 if operators[at] == "alloc" else -1
        used_bytes[rank] = used_bytes.get(rank, 0.0) + sign * num_bytes
        place = {"pid": pid_of(rank), "tid": 0, "ts": float(start_s[at]) * _US}
        yield {"ph": "C", "name": "memory", "args": {"device_bytes": used_bytes[rank]}, **place}


def _process(pid: int, rank: int, trace: Trace) -> Iterator[TraceEvent]:
    for what, value in (
        ("process_name", {"name": f"rank {rank} ({trace.source})"}),
        ("process_sort_index", {"sort_index": pid}),
    ):
        yield {"ph": "M", "name": what, "pid": pid, "tid": 0, "ts": 0, "args": value}


def _thread(pid: int, tid: int, lane: str) -> Iterator[TraceEvent]:
    for what, value in (
        ("thread_name", {"name": lane}),
        ("thread_sort_index", {"sort_index": tid}),
    ):
        yield {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": value}


def _slice(row: Mapping[str, Any], place: TraceEvent) -> TraceEvent:
    event = {"name": row["action_id"] or row["operator"], "cat": row["phase"] or "other", **place}
    event["args"] = {name: row[name] for name, empty in _EMPTY.items() if row[name] != empty}
    if row["dur_s"] > 0:
        return event | {"ph": "X", "dur": row["dur_s"] * _US}
    return event | {"ph": "i", "s": "t"}


class _Arrows:
    """Pairs sends with receives, first in, first out per (source, target, axis, phase, item)."""

    def __init__(self, number: int) -> None:
        self._prefix = f"{number}."
        self._count = 0
        self._open: dict[tuple[object, ...], deque[tuple[str, int]]] = {}

    def of(self, row: Mapping[str, Any], place: TraceEvent) -> Iterator[TraceEvent]:
        """The end of an arrow at this row; the later row of a pair finds the earlier one's name."""
        kind = row["operator"]
        if kind not in ("send", "recv") or row["dur_s"] <= 0:
            return
        ends = (row["rank"], row["peer"]) if kind == "send" else (row["peer"], row["rank"])
        waiting = self._open.setdefault((*ends, row["axis"], row["phase"], row["item"]), deque())
        if waiting and waiting[0][0] != kind:
            name = waiting.popleft()[1]
        else:
            self._count += 1
            name = self._count
            waiting.append((kind, name))
        arrow = {"name": "message", "cat": "message", "id": f"{self._prefix}{name}"}
        if kind == "send":
            yield {**arrow, "ph": "s", **place}
        else:  # binds to the slice that encloses it, so a little before its end
            end_us = place["ts"] + 0.99 * row["dur_s"] * _US
            yield {**arrow, "ph": "f", "bp": "e", **place, "ts": end_us}


def write_perfetto(path: str | Path, traces: Trace | Sequence[Trace]) -> None:
    """Write one file with one or several traces on a common time axis.

    Args:
        path: a .json file; a file that is there is replaced.
        traces: simulated, measured, or both to compare them.
    """
    chosen = [traces] if isinstance(traces, Trace) else list(traces)
    notes = {f"{trace.source} {trace.job}".strip(): dict(trace.notes) for trace in chosen}
    head = {"displayTimeUnit": "ms", "otherData": {k: json.dumps(v) for k, v in notes.items()}}
    with open(path, "w") as file:
        file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        for index, event in enumerate(trace_events(chosen)):
            file.write((",\n" if index else "") + json.dumps(event))
        file.write("\n]}\n")
