"""What a run writes as it trains: a JSON line a step, spans of its parts, operators on demand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from phalanx.trace import Trace, TraceBuilder, merge
from phalanx.worlds.comm_log import CommLog
from phalanx.worlds.torch_log import SpanLog

_PHASE_NAMES = {"F": "forward", "B": "backward", "O": "optimizer"}


class MetricsFile:
    """JSON lines, one object per step or evaluation; written by rank 0, flushed line by line."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("w", encoding="utf-8") if path is not None else None

    def write(self, **values: Any) -> None:
        """One line."""
        if self._file is not None:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()

    def close(self) -> None:
        """No more lines."""
        if self._file is not None:
            self._file.close()


class StepTrace:
    """Trace rows of this rank: a span per step and per part of it, always.

    Args:
        rank, job: written into every row.
    """

    def __init__(self, rank: int, job: str) -> None:
        self.rank, self.origin_s = rank, perf_counter()
        self._builder = TraceBuilder("measured", job)

    def add_step(self, step: int, spans: SpanLog) -> float:
        """Rows of a step whose parts `spans` noted; returns its seconds."""
        parts = list(spans.spans_s())
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
                lane="compute",
                start_s=begin_s,
                dur_s=done_s - begin_s,
            )
        return end_s - start_s

    def extend(self, rows: Iterator[dict[str, Any]]) -> None:
        """More rows, such as operators or communication."""
        self._builder.extend({"role": "train", **row} for row in rows)

    def build(self) -> Trace:
        """The table so far."""
        return self._builder.build()


def write_traces(folder: Path, trace: Trace, rank: int, world_size: int, barrier: Any) -> Path:
    """One file with the rows of all ranks, written by rank 0; all ranks call it."""
    part = folder / f"trace-rank{rank}.npz"
    target = folder / "trace.npz"
    trace.save(part)
    barrier()
    if rank == 0:
        parts = [folder / f"trace-rank{each}.npz" for each in range(world_size)]
        merge([Trace.load(each) for each in parts]).save(target)
        for each in parts:
            each.unlink()
    barrier()
    return target


class OperatorProfile:
    """Every operator and collective of chosen steps, as trace rows.

    Args:
        rank: written into the rows.
        units: name -> module; operators inside one carry its name as `layer`, and so do the
            operators of its backward pass (by autograd's sequence numbers).
    """

    def __init__(self, rank: int, units: dict[str, nn.Module], device: torch.device) -> None:
        self.rank, self._units, self._device = rank, units, device

    @contextmanager
    def step(self, number: int, trace: StepTrace) -> Iterator[None]:
        """Profile this block as step `number` of the trace."""
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        log = CommLog(self.rank, trace.origin_s)
        hooks = [hook for name, unit in self._units.items() for hook in _named_scope(name, unit)]
        try:
            with profile(activities=activities, with_flops=True) as profiler, log.step(number):
                start_s = perf_counter() - trace.origin_s
                yield
        finally:
            for hook in hooks:
                hook.remove()
        trace.extend(self._rows(profiler.events(), number, start_s))
        trace.extend(row for row in log.trace_rows() if row["lane"] != "step")

    def _rows(self, events: Any, number: int, start_s: float) -> Iterator[dict[str, Any]]:
        layer_of = _layers_by_sequence(events)
        begin_us = min((event.time_range.start for event in events), default=0.0)
        for event in events:
            if not _is_operator(event):
                continue
            yield {
                "rank": self.rank,
                "step": number,
                "action_id": f"op{event.id}",
                "operator": event.name,
                "layer": _layer(event) or layer_of.get(_sequence(event), ""),
                "phase": "B" if _node(event) is not None else "",
                "lane": f"thread{event.thread}",
                "start_s": start_s + (event.time_range.start - begin_us) * 1e-6,
                "dur_s": (event.time_range.end - event.time_range.start) * 1e-6,
                "flops": float(event.flops or 0.0),
            }


_SCOPE = "unit:"
_NODE = "autograd::engine::evaluate_function"


def _named_scope(name: str, module: nn.Module) -> tuple[Any, Any]:
    scopes: list[Any] = []

    def enter(_module: nn.Module, _args: Any) -> None:
        scopes.append(torch.profiler.record_function(_SCOPE + name).__enter__())

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        scopes.pop().__exit__(None, None, None)

    return module.register_forward_pre_hook(enter), module.register_forward_hook(leave)


def _is_operator(event: Any) -> bool:
    """An ATen operator that no other ATen operator called."""
    parent = event.cpu_parent
    return event.name.startswith("aten::") and not (parent and parent.name.startswith("aten::"))


def _ancestors(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.cpu_parent


def _layer(event: Any) -> str:
    names = (each.name for each in _ancestors(event))
    return next((name.removeprefix(_SCOPE) for name in names if name.startswith(_SCOPE)), "")


def _node(event: Any) -> Any:
    """The backward node that runs this operator, if one does."""
    return next((each for each in _ancestors(event) if each.name.startswith(_NODE)), None)


def _sequence(event: Any) -> int:
    node = _node(event)
    return node.sequence_nr if node is not None else -1


def _layers_by_sequence(events: Any) -> dict[int, str]:
    found: dict[int, str] = {}
    for event in events:
        if event.sequence_nr >= 0 and _node(event) is None and (layer := _layer(event)):
            found.setdefault(event.sequence_nr, layer)
    return found
