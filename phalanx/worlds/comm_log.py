"""What was sent: one row per operation of this process, kept step by step.

Bytes follow `action.Collective`: `payload_bytes` is the whole logical tensor on one rank (gathered
output, reduce-scatter input, reduced tensor, all-to-all input), independent of the algorithm.
Times: from issue until the caller has waited, so an upper bound where compute ran in between;
`wait_rows` tell for how long it was held up. Rows of an accelerator are timed by events on the
issuing stream, in the same sense.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Protocol

from phalanx.cost import collectives
from phalanx.trace import Trace, TraceBuilder

P2P = ("send", "recv")
WAIT = "wait"
_ROOTED = ("reduce", "gather", "scatter")


class Clock(Protocol):
    """Moments on the device that communicates: `torch_clock.DeviceClock`."""

    def now(self) -> Any:
        """The present moment."""
        ...

    def seconds(self, moment: Any) -> float:
        """A moment by `time.perf_counter`."""
        ...


class CommRow:
    """One operation of one rank.

    Attributes:
        name: the same on all ranks that take part: "tp#3" is the fourth collective of my tp group,
            "pp:0>1#2" the third message from 0 to 1 (coordinates on the axis).
        peer: global rank of the other end of a message (-1: none or any).
        start, end: moments of `clock`; `end` is the end of the issue until someone waited.
        held: when the caller began to wait; None before.
    """

    __slots__ = (
        *("axis", "kind", "name", "peer", "payload_bytes", "group_size"),
        *("clock", "start", "end", "waited", "held"),
    )

    def __init__(
        self,
        axis: str,
        kind: str,
        name: str,
        peer: int,
        payload_bytes: int,
        group_size: int,
        clock: Clock,
    ) -> None:
        self.axis, self.kind, self.name, self.peer = axis, kind, name, peer
        self.payload_bytes, self.group_size = payload_bytes, group_size
        self.clock, self.waited = clock, False
        self.start = self.end = clock.now()
        self.held: Any = None

    def __str__(self) -> str:
        state = "done" if self.waited else "not seen to end"
        return f"{self.kind} {self.name}, {self.payload_bytes} bytes, {state}"

    def begin_wait(self) -> None:
        """The caller waits for it from now on; the first time counts."""
        if self.held is None:
            self.held = self.clock.now()

    def set_end(self, *, waited: bool) -> None:
        """The issue or (`waited`) the operation has ended; waiting again changes nothing."""
        if not self.waited:
            self.end, self.waited = self.clock.now(), waited

    @property
    def wire_bytes(self) -> float:
        """Bytes that this rank puts on the wire."""
        return wire_bytes(self.kind, self.payload_bytes, self.group_size)


def wire_bytes(kind: str, payload_bytes: float, group_size: int) -> float:
    """Bytes that one rank sends with a bandwidth-optimal algorithm (of rooted ones: on average)."""
    if kind in P2P:
        return payload_bytes if kind == "send" else 0.0
    known = "broadcast" if kind in _ROOTED else kind  # n - 1 edges of a tree, like a broadcast
    return collectives.wire_bytes(known, payload_bytes, group_size)


class CommLog:
    """The communication of this process, step by step; nothing is kept outside `step`.

    Args:
        rank: global rank, written into every row.
        origin_s: `time.perf_counter` that counts as 0 (None: now).
    """

    def __init__(self, rank: int, origin_s: float | None = None) -> None:
        self.rank = rank
        self.origin_s = perf_counter() if origin_s is None else origin_s
        self.rows: list[CommRow] = []
        self._steps: list[tuple[int, float, float, int]] = []  # number, start, end, first row

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Keep the communication of this block as step `number`."""
        global _active
        outer, _active = _active, self
        first, start_s = len(self.rows), perf_counter()
        try:
            yield
        finally:
            _active = outer
            self._steps.append((number, start_s, perf_counter(), first))

    def seen(self, kinds: Sequence[str] = ()) -> list[tuple[str, str, int]]:
        """(axis, kind, payload bytes) in order of issue; all kinds unless some are named."""
        rows = (row for row in self.rows if not kinds or row.kind in kinds)
        return [(row.axis, row.kind, row.payload_bytes) for row in rows]

    def clear(self) -> None:
        """Forget all rows and steps."""
        self.rows, self._steps = [], []

    def trace_rows(self) -> Iterator[dict[str, Any]]:
        """Rows for a TraceBuilder: a span per step, then its communication."""
        ends = [first for *_, first in self._steps[1:]] + [len(self.rows)]
        for (number, start_s, end_s, first), after in zip(self._steps, ends):
            span = {"action_id": f"step{number}", "operator": "step", "lane": "step"}
            times = {"start_s": start_s - self.origin_s, "dur_s": end_s - start_s}
            yield {"rank": self.rank, "step": number} | span | times
            for row in self.rows[first:after]:
                yield self._trace_row(row, number)

    def wait_rows(self) -> Iterator[dict[str, Any]]:
        """Rows for a TraceBuilder: how long this rank was held up by each operation."""
        ends = [first for *_, first in self._steps[1:]] + [len(self.rows)]
        for (number, _, _, first), after in zip(self._steps, ends):
            for row in self.rows[first:after]:
                if row.waited and row.held is not None:
                    yield self._wait_row(row, number)

    def trace(self, job: str = "") -> Trace:
        """The rows so far as a measured trace."""
        builder = TraceBuilder("measured", job)
        builder.extend(self.trace_rows())
        return builder.build()

    def _wait_row(self, row: CommRow, step: int) -> dict[str, Any]:
        start_s = row.clock.seconds(row.held)
        times = {"start_s": start_s - self.origin_s, "dur_s": row.clock.seconds(row.end) - start_s}
        bare = {"operator": WAIT, "payload_bytes": 0.0, "wire_bytes": 0.0}
        return self._trace_row(row, step) | bare | times

    def _trace_row(self, row: CommRow, step: int) -> dict[str, Any]:
        start_s, end_s = row.clock.seconds(row.start), row.clock.seconds(row.end)
        lane = f"{row.kind}:{row.axis}" if row.kind in P2P else f"axis:{row.axis}"
        return {
            "rank": self.rank,
            "step": step,
            "action_id": row.name,
            "operator": row.kind,
            "lane": lane,
            "axis": row.axis,
            "peer": row.peer,
            "start_s": start_s - self.origin_s,
            "dur_s": end_s - start_s,
            "payload_bytes": float(row.payload_bytes),
            "wire_bytes": row.wire_bytes,
        }


_active: CommLog | None = None
_last: CommRow | None = None
_num_issued = 0


def issued(row: CommRow) -> None:
    """An operation is about to be issued."""
    global _last, _num_issued
    _last = row
    _num_issued += 1
    if _active is not None:
        _active.rows.append(row)


def last_row() -> CommRow | None:
    """The newest operation of this process; None before the first."""
    return _last


def num_issued() -> int:
    """Operations of this process so far; of ranks that run one program, the least is behind."""
    return _num_issued


def last_collective() -> str | None:
    """The newest operation in words, for messages about hangs."""
    return None if _last is None else str(_last)
