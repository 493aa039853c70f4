"""SPEED."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="speed-decoding",
    title="SPEED",
    papers=(
        Source(
            "SPEED: Speculative Pipelined Execution for Efficient Decoding",
            "arXiv 2310.12072",
            "C. Hooper and others (UC Berkeley), ENLSP workshop at NeurIPS 2023",
        ),
    ),
    mechanism=(
        "An early layer guesses the next token and the model starts on the guess while the "
        "current token still runs to the last layer, so several tokens are in flight at different "
        "depths. Where layers share parameters they form a small batch over the same weights; a "
        "wrong guess rolls the later tokens and their cache entries back, and the output equals "
        "greedy decoding."
    ),
    policies=("speculate/speed",),
)
