"""What a run writes while it trains: a JSON line a step, and trace rows of its parts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from phalanx.engines.process import Process
from phalanx.engines.run_folder import write_run_file
from phalanx.engines.trainer_step import StepSpans
from phalanx.trace import Trace, TraceBuilder, merge

_MOST_ROWS, _MOST_ROWS_OF_ALL, _FEWEST_ROWS = 100_000, 500_000, 1_000  # 0.5 kB of memory each
_PHASE_NAMES = {"F": "forward", "B": "backward", "P": "pipeline", "O": "optimizer"}


class MetricsFile:
    """JSON lines, one object per step or evaluation; written by rank 0, line by line.

    A disk that is full for a while costs no line and does not end the run: what could not be
    written is tried again with the next line.

    Args:
        path: None on other ranks.
        done_steps: steps of a run that is resumed: their lines stay, later ones are cut off.
        on_failure: hears when a line cannot be written, once until one can be.
    """

    def __init__(
        self,
        path: Path | None,
        done_steps: int = 0,
        on_failure: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._path, self._on_failure = path, on_failure
        self._rest, self._fails = b"", False
        if path is not None:
            write_run_file(path, "".join(_lines_up_to(path, done_steps)) if done_steps else "")
            self._file = path.open("ab", buffering=0)

    def write(self, **values: Any) -> None:
        """One line."""
        if self._path is None:
            return
        self._rest += json.dumps(values).encode() + b"\n"
        try:
            while self._rest:
                self._rest = self._rest[self._file.write(self._rest) :]
            self._fails = False
        except OSError as error:
            first, self._fails = not self._fails, True
            if first:
                self._on_failure(f"{self._path} cannot be written: {error.strerror or error}")

    def close(self) -> None:
        """No more lines."""
        if self._path is not None:
            self._file.close()


def _lines_up_to(path: Path, step: int) -> list[str]:
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as file:
        return [line for line in file if _step_of(line) <= step]


def _step_of(line: str) -> float:
    """Of a line of metrics; a process that was killed may have left half of one."""
    try:
        return json.loads(line).get("step", 0) if line.endswith("\n") else math.inf
    except (ValueError, AttributeError):
        return math.inf


class StepTrace:
    """Trace rows of this rank: a span per step and per part of it, always.

    A run of weeks keeps those of its last steps: half of `most_rows` at least, once there are as
    many. What a step of a pipeline adds is hundreds of rows on every rank, and rank 0 joins them.

    Args:
        rank, job: written into every row.
        most_rows: beside those of the newest step; see `rows_of_rank`.
    """

    def __init__(self, rank: int, job: str, most_rows: int = _MOST_ROWS) -> None:
        self.rank, self.origin_s = rank, perf_counter()
        self._job, self._most_rows = job, most_rows
        self._before: TraceBuilder | None = None  # steps that are the next to go
        self._builder = TraceBuilder("measured", job)

    def add_step(self, step: int, spans: StepSpans) -> float:
        """Rows of a step whose parts `spans` noted; returns its seconds."""
        if 2 * len(self._builder) >= self._most_rows:
            self._before, self._builder = self._builder, TraceBuilder("measured", self._job)
        parts = spans.parts(self.origin_s)
        start_s, end_s = parts[0][1], parts[-1][2]
        common = {"role": "train", "rank": self.rank, "step": step}
        self._builder.add(
            **common,
            action_id=f"step{step}",
            operator="step",
            lane="step",
            start_s=start_s,
            dur_s=end_s - start_s,
        )
        for work, begin_s, done_s in parts:
            self._builder.add(
                **common,
                action_id=f"{work.phase}{work.item}" if work.item >= 0 else work.phase,
                operator=_PHASE_NAMES[work.phase],
                phase=work.phase,
                item=work.item,
                lane="step" if work.phase == "P" else "compute",
                start_s=begin_s,
                dur_s=done_s - begin_s,
            )
        self.extend(iter(spans.action_rows(self.origin_s)))
        return end_s - start_s

    def extend(self, rows: Iterator[dict[str, Any]]) -> None:
        """More rows, such as operators or communication."""
        self._builder.extend({"role": "train", **row} for row in rows)

    def build(self) -> Trace:
        """The table so far."""
        last = self._builder.build()
        return last if self._before is None else merge([self._before.build(), last])


def rows_of_rank(num_ranks: int) -> int:
    """How many rows a rank keeps of a run, so that those of all ranks can be joined in one."""
    return max(_FEWEST_ROWS, min(_MOST_ROWS, _MOST_ROWS_OF_ALL // num_ranks))


def write_traces(folder: Path, trace: Trace, process: Process) -> str:
    """One file with the rows of all ranks, written by rank 0; all ranks call it.

    Returns:
        Its name; "" where a rank found no room: a run does not end for want of its trace.
    """
    parts = [folder / f"trace-rank{each}.npz" for each in range(process.world_size)]
    target = folder / "trace.npz"
    fails = _fails(lambda: trace.save(parts[process.rank]))
    if not process.sum(fails) and process.leads:
        fails = _fails(lambda: merge([Trace.load(each) for each in parts]).save(target))
    is_missing = bool(process.sum(fails))
    parts[process.rank].unlink(missing_ok=True)
    if is_missing and process.leads:
        target.unlink(missing_ok=True)
    return "" if is_missing else target.name


def _fails(write: Callable[[], object]) -> bool:
    try:
        write()
    except OSError:
        return True
    return False
