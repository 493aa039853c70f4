"""Our engine on two processes, FSDP2."""

from __future__ import annotations

from collections.abc import Callable

from peers.case import Case
from peers.phalanx_engine import FSDP, built

NAME = "Phalanx, FSDP on 2 processes"
NUM_PROCESSES = 2


def build(case: Case) -> Callable[[int], None]:
    """A step of the engine."""
    return built(case, {"shard": 2}, [FSDP])
