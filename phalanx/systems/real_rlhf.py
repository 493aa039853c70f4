"""ReaL."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="real-rlhf",
    title="ReaL",
    papers=(
        Source(
            "ReaL: Efficient RLHF Training of Large Language Models with Parameter Reallocation",
            "arXiv 2406.14088",
            "Mei, Fu, Li, Wang, Zhang, Wu (Tsinghua, OpenPsi, Ant), MLSys 2025",
        ),
    ),
    mechanism=(
        "Every call of an RLHF step (generate, infer, train) gets its own device mesh and "
        "degrees, and weights move between layouts right before a call. A Monte Carlo search over "
        "a cheap estimator finds the assignment before training starts."
    ),
    policies=("place/real",),
    code="github.com/openpsi-project/ReaLHF",
)
