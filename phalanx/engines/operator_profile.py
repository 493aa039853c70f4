"""Operators of chosen steps as trace rows, from torch's profiler."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from phalanx.engines.metrics import StepTrace
from phalanx.worlds.comm_log import CommLog

_SCOPE = "unit:"
_NODE = "autograd::engine::evaluate_function"
_SEQUENCE = "Sequence number"
# ATen's operators, and autograd functions of our own ("_RmsNorm", "_RmsNormBackward",
# "RingAttention"), since their kernels are called past ATen.
_OPERATOR = re.compile(r"aten::|_|\w+Attention(Backward)?$")


class OperatorProfile:
    """Every operator and collective of chosen steps; slow, so never of all of them.

    Args:
        rank: written into the rows.
        units: name -> module; operators inside one carry its name as `layer`, and so do the
            operators of its backward pass (by autograd's sequence numbers).
        device: kernels are recorded too where it is an accelerator.
    """

    def __init__(self, rank: int, units: Mapping[str, nn.Module], device: torch.device) -> None:
        self.rank, self._units, self._device = rank, units, device

    @contextmanager
    def step(self, number: int, trace: StepTrace) -> Iterator[None]:
        """Profile this block as step `number` of the trace."""
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        log = CommLog(self.rank, trace.origin_s)
        hooks = [hook for name, unit in self._units.items() for hook in _named_scope(name, unit)]
        try:
            with profile(activities=activities) as profiler, log.step(number):
                start_s = perf_counter() - trace.origin_s
                yield
        finally:
            for hook in hooks:
                hook.remove()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "profile.json"
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        common = {"rank": self.rank, "step": number}
        trace.extend({**row, **common} for row in operator_rows(events, start_s))
        trace.extend(row for row in log.trace_rows() if row["lane"] != "step")
        trace.extend(log.wait_rows())


def _named_scope(name: str, module: nn.Module) -> tuple[Any, Any]:
    scopes: list[Any] = []

    def enter(_module: nn.Module, _args: Any) -> None:
        scopes.append(record_function(_SCOPE + name).__enter__())

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        scopes.pop().__exit__(None, None, None)

    return module.register_forward_pre_hook(enter), module.register_forward_hook(leave)


def operator_rows(events: list[dict[str, Any]], start_s: float) -> Iterator[dict[str, Any]]:
    """Rows of the outermost operators (and of kernels) of a Chrome trace that torch wrote.

    Operators are those of ATen and our own autograd functions; what these call is inside of them.

    Args:
        events: its "traceEvents".
        start_s: when the first of them happened.
    """
    spans = [e for e in events if e.get("ph") == "X" and "dur" in e]
    begin_us = min((e["ts"] for e in spans), default=0.0)
    nested = list(_nested(spans))
    layer_of = {
        e["args"][_SEQUENCE]: layer
        for e, layer, node, _ in nested
        if layer and node is None and _SEQUENCE in e.get("args", {})
    }
    for event, layer, node, is_inner in nested:
        is_kernel = event.get("cat") == "kernel"
        if not is_kernel and (is_inner or not _OPERATOR.match(event["name"])):
            continue
        sequence = node["args"].get(_SEQUENCE) if node is not None else None
        yield {
            "operator": event["name"],
            "layer": layer or layer_of.get(sequence, ""),
            "phase": "" if node is None else "B",
            "lane": f"{'stream' if is_kernel else 'thread'}{event['tid']}",
            "start_s": start_s + (event["ts"] - begin_us) * 1e-6,
            "dur_s": event["dur"] * 1e-6,
        }


def _nested(
    spans: list[dict[str, Any]],
) -> Iterator[tuple[dict[str, Any], str, dict[str, Any] | None, bool]]:
    """(event, unit around it, backward node around it, whether an operator is around it)."""
    threads: dict[Any, list[tuple[float, dict, str, dict | None, bool]]] = {}
    for event in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
        stack = threads.setdefault((event.get("pid"), event.get("tid")), [])
        while stack and stack[-1][0] <= event["ts"]:
            stack.pop()
        layer, node, is_inner = stack[-1][2:] if stack else ("", None, False)
        yield event, layer, node, is_inner
        name = event["name"]
        if name.startswith(_SCOPE):
            layer = name.removeprefix(_SCOPE)
        elif name.startswith(_NODE):
            node = event
        is_inner = is_inner or _OPERATOR.match(name) is not None
        stack.append((event["ts"] + event["dur"], event, layer, node, is_inner))
