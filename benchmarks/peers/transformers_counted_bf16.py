"""The gated loop with adapters in bfloat16, which is not peft's default: less exact, less work."""

from __future__ import annotations

from collections.abc import Callable

from peers import transformers_counted
from peers.case import Case

NAME = "the same, adapters in bfloat16"
NUM_PROCESSES = 1


def build(case: Case) -> Callable[[int], None]:
    """As `transformers_counted`."""
    return transformers_counted.build(case, autocast_adapters=False)
