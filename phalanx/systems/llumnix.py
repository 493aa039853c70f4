"""Llumnix."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="llumnix",
    title="Llumnix",
    papers=(
        Source(
            "Llumnix: Dynamic Scheduling for Large Language Model Serving",
            "arXiv 2406.03243",
            "OSDI 2024",
        ),
    ),
    mechanism=(
        "Running requests move between replicas: the append-only cache is copied while decoding "
        "goes on and the request stops only for the last blocks. Balance, defragmentation, "
        "priority and draining are all written as a virtual memory usage per request, and one "
        "rule on freeness (memory left per running request) dispatches, migrates and scales."
    ),
    policies=("cluster/llumnix",),
    code="github.com/AlibabaPAI/llumnix",
)
