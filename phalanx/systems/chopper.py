"""Chopper."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="chopper",
    title="Chopper",
    papers=(
        Source(
            "Chopper: A Multi-Level GPU Characterization Tool & Derived Insights Into LLM "
            "Training Inefficiency",
            "arXiv 2512.08242",
            "Kurzynski, Aga, Wu (University of Central Florida, AMD), 2025",
        ),
    ),
    mechanism=(
        "A profiler trace with true overlap is joined with hardware counters from separate, "
        "serialised runs; every kernel is labelled with operator, layer, phase, step and device. "
        "An operator's duration is then a product of factors over its theoretical time (extra "
        "instructions, matrix-unit use, overlap, clock), and gaps are launch overhead."
    ),
    modules=("analyze/chopper",),
    code="github.com/UnaryLab/chopper",
)
