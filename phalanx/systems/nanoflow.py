"""NanoFlow."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="nanoflow",
    title="NanoFlow",
    papers=(
        Source(
            "NanoFlow: Towards Optimal Large Language Model Serving Throughput",
            "arXiv 2408.12757",
            "OSDI 2025",
        ),
    ),
    mechanism=(
        "The batch of a serving step is cut into nano-batches and each operator is issued once "
        "per nano-batch, so that operators bound by compute, by memory and by the network run at "
        "the same time on one device. The price, reading the weights once per nano-batch, stays "
        "hidden while compute is the bottleneck; a search in two stages fixes order and resource "
        "shares, and batches are formed one step ahead."
    ),
    policies=("serve/nanoflow",),
    code="github.com/efeslab/Nanoflow",
)
