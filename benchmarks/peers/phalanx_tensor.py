"""Our engine on two processes, tensor parallel."""

from __future__ import annotations

from collections.abc import Callable

from peers.case import Case
from peers.phalanx_engine import built

NAME = "Phalanx, tensor parallel on 2 processes"
NUM_PROCESSES = 2


def build(case: Case) -> Callable[[int], None]:
    """A step of the engine."""
    return built(case, {"tp": 2}, [{"family": "tensor", "name": "megatron", "gather_twice": False}])
