"""How `phalanx plan --serve` writes engines, rates and times."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from phalanx.cost.bars import Bar
from phalanx.planner.serve_answers import Engines


def engine_words(best: Engines) -> str:
    """Engines of a cluster, and how each is cut."""
    engines = f"{best.replicas:,} engine{'s' if best.replicas > 1 else ''}"
    devices = f"{best.idle:,} device{'s' if best.idle > 1 else ''}"
    idle = f", {devices} idle" if best.idle else ""
    return f"{engines} of {cut_words(best.degrees)}{idle}"


def cut_words(degrees: Mapping[str, int]) -> str:
    """Degrees above one."""
    names = {"tensor": "tensor", "pipeline": "stages", "expert": "expert",
             "attention_dp": "attention replicas"}  # fmt: skip
    cut = [f"{names[name]} {degree}" for name, degree in degrees.items() if degree > 1]
    return ", ".join(cut) or "one device"


def per_s(rate: float) -> str:
    """Requests a second."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def share_words(frac: float) -> str:
    """In per cent."""
    return f"{100 * frac:.0f} %" if frac <= 10 else "> 1,000 %"


def bar_words(bar: Bar) -> str:
    """Seconds with what holds 90 % of them."""
    return f"{time_words(bar.value)} ({time_words(bar.low)} to {time_words(bar.high)})"


def time_words(seconds: float) -> str:
    """Seconds or milliseconds; "" for a time that is not known."""
    if not isfinite(seconds):
        return ""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
