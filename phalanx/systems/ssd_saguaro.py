"""Speculative speculative decoding (Saguaro)."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="ssd-saguaro",
    title="Speculative speculative decoding (Saguaro)",
    papers=(
        Source(
            "Speculative Speculative Decoding",
            "arXiv 2603.03251",
            "T. Kumar, T. Dao, A. May, ICLR 2026",
        ),
    ),
    mechanism=(
        "While a round is verified, the draft device guesses how the verification will end and "
        "drafts the next round for the likeliest outcomes; on a hit the next proposal is there at "
        "once. Outcomes get branches in a geometric fan-out, the draft distribution is bent so "
        "that they are easier to guess, and a miss falls back by batch size. The target's "
        "distribution is kept."
    ),
    policies=("speculate/saguaro",),
    code="github.com/tanishqkumar/ssd",
)
