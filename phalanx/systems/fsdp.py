"""PyTorch FSDP and hybrid sharding."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="fsdp",
    title="PyTorch FSDP and hybrid sharding",
    papers=(
        Source(
            "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel",
            "arXiv 2304.11277",
            "PVLDB 16(12), 2023",
        ),
    ),
    mechanism=(
        "Parameters, gradients and optimizer state are kept as 1/F shards; a unit, usually one "
        "block, is gathered just before it computes, freed just after, and its gradients are "
        "reduce-scattered. Peak parameter memory becomes the own shards plus the largest gathered "
        "units, for 1.5 times the traffic of plain data parallelism. With F below the number of "
        "ranks, shards stay inside a host and are replicated across hosts."
    ),
    policies=("data/fsdp",),
    code="github.com/pytorch/pytorch",
    ran=(
        (
            "Two and four gloo processes on CPUs: full and hybrid sharding, with and "
            "without reshard, beside tensor and context axes, equal to one process; the "
            "real log equals the lowered step (tests/engines)."
        ),
        "`phalanx train` with Gemma 3 270M on two processes (docs/performance.md).",
        "Not run: NCCL, several machines; the rate limiter has no counterpart in FSDP2.",
    ),
)
