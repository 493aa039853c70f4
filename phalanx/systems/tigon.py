"""Tigon."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="tigon",
    title="Tigon",
    papers=(
        Source(
            "Tigon: A Distributed Database for a CXL Pod",
            "github.com/ut-datasys/tigon",
            "UT Austin, UIUC, OSDI 2025",
        ),
    ),
    mechanism=(
        "A partitioned in-memory database keeps rows in each host's own memory and moves to "
        "shared memory only those that several hosts touch at the moment. One 8-byte word per "
        "shared row holds latch, lock and coherence bits in the scarce coherent region; once a "
        "row is shared any host locks and writes it, so transactions need no two-phase commit."
    ),
    policies=("place/tigon",),
    modules=("stores/shared_tuples",),
    code="github.com/ut-datasys/tigon",
)
