"""WLB-LLM."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="wlb-llm",
    title="WLB-LLM",
    papers=(
        Source(
            "WLB-LLM: Workload-Balanced 4D Parallelism for Large Language Model Training",
            "arXiv 2503.17924",
            "Wang, Cai, Xie, Pan, Guan, Chu and others (UCSD, Meta), OSDI 2025",
        ),
    ),
    mechanism=(
        "Packed documents of equal token count are unequal work, so micro-batches are packed by "
        "predicted time and may differ in length up to a memory bound; the few very long "
        "documents wait in queues until each micro-batch can take one. Inside the context group "
        "each document is cut head and tail, or the whole sequence is, whichever a kernel-time "
        "model prefers."
    ),
    policies=("balance/wlb", "context/per_document"),
    builds_on=("context/all_gather",),
)
