"""The best evaluation of a run, and how many since were no better. No torch.

Every rank sees the same losses, so every rank decides the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class BestLoss:
    """The lowest held-out loss and when it was.

    Args:
        patience: evaluations without improvement that end the run; 0: none do.

    Attributes:
        loss, step: of the best evaluation; infinite and -1 before the first.
        num_worse: evaluations since that were not lower.
    """

    def __init__(self, patience: int = 0) -> None:
        self.patience = patience
        self.loss, self.step, self.num_worse = math.inf, -1, 0

    def note(self, step: int, loss: float) -> bool:
        """Another evaluation, after `step` steps; whether it is the best so far.

        A loss that is no number is never the best and counts as worse.
        """
        if loss < self.loss:
            self.loss, self.step, self.num_worse = loss, step, 0
            return True
        self.num_worse += 1
        return False

    @property
    def should_stop(self) -> bool:
        """Whether patience is at its end."""
        return 0 < self.patience <= self.num_worse

    @property
    def reason(self) -> str:
        """Why, in words."""
        count = f"{self.num_worse} evaluation{'s' * (self.num_worse > 1)}"
        return f"{count} without improvement on {self.loss:.4f} after step {self.step}"

    def state(self) -> dict[str, Any]:
        """For a checkpoint; JSON."""
        loss = None if math.isinf(self.loss) else self.loss
        return {"loss": loss, "step": self.step, "num_worse": self.num_worse}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`."""
        self.loss = math.inf if state["loss"] is None else float(state["loss"])
        self.step, self.num_worse = int(state["step"]), int(state["num_worse"])
