"""Our engine on two processes that share every row."""

from __future__ import annotations

from collections.abc import Callable

from peers.case import Case
from peers.phalanx_engine import built

NAME = "Phalanx, context parallel on 2 processes"
NUM_PROCESSES = 2


def build(case: Case) -> Callable[[int], None]:
    """A step of the engine."""
    return built(case, {"cp": 2}, [{"family": "context", "name": "all_gather"}])
