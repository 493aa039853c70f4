"""How far a run has come: all that is not in a tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Progress:
    """The counters of a run, from which it goes on.

    Attributes:
        step: steps done.
        next_sample: global counter of the first sample that no step has seen.
        num_tokens, num_counted: tokens of all steps, and those that were targets.
        best_loss: lowest held-out loss so far; inf: nothing was evaluated.
        best_step: steps done when it was seen.
        evaluations: [step, loss] of each evaluation.
        extra: what else has to survive, as JSON holds it.
    """

    step: int
    next_sample: int = 0
    num_tokens: int = 0
    num_counted: int = 0
    best_loss: float = math.inf
    best_step: int = 0
    evaluations: list[list[float]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON form; JSON has no infinity, so that is null."""
        table = asdict(self)
        return table | {"best_loss": None if math.isinf(self.best_loss) else self.best_loss}

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Progress:
        """The progress of which `table` is the `to_dict`."""
        known = {each.name: table[each.name] for each in fields(cls) if each.name in table}
        if known.get("best_loss") is None:
            known["best_loss"] = math.inf
        return cls(**known)
