"""FT-HSDP."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="ft-hsdp",
    title="FT-HSDP",
    papers=(
        Source(
            "Training LLMs with Fault Tolerant HSDP on 100,000 GPUs",
            "arXiv 2602.00277",
            "Meta and others, 2026",
        ),
    ),
    mechanism=(
        "The unit of failure is one data-parallel replica with everything inside it: when a "
        "device breaks, its replica leaves and the others go on with an all-reduce whose "
        "membership may change between steps. A replica that returns loads a healthy peer's state "
        "of the start of a step and joins that step with a zero gradient, so it equals the others "
        "after the common update."
    ),
    policies=("recover/rejoin",),
    builds_on=("data/fsdp",),
    modules=("membership",),
)
