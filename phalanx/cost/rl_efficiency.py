"""What published steps of reinforcement learning take of the formulas of `cost.rl_step`.

Three numbers for all machines and models (`rl_efficiency.json`, written by `benchmarks/fit_rl.py`);
generation rests on the serving table, training on the training table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any

TABLE = "rl_efficiency.json"


@dataclass(frozen=True, kw_only=True)
class RlEfficiency:
    """Attributes that formulas multiply with, and how far they are off.

    Attributes:
        learning_factor: log-probabilities and updates over tuned pre-training of the same tokens.
        packed_bytes_per_s: of one copy of the weights, on its way to engines on the same devices.
        apart_factor: that rate towards engines on devices of their own, over `packed_bytes_per_s`.
        low, high: measured over predicted, 5th and 95th percentile of rows left out of the fit.
        num_rows: behind it.
        sources: that they are from.
        median_error: of rows left out of the fit, in whole groups.
    """

    learning_factor: float
    packed_bytes_per_s: float
    apart_factor: float
    low: float
    high: float
    num_rows: int
    sources: Mapping[str, int]
    median_error: float

    def describe(self) -> str:
        """One line."""
        names = ", ".join(self.sources)
        return (
            f"learning x{self.learning_factor:.2g} of tuned pre-training, weights packed at "
            f"{self.packed_bytes_per_s / 1e9:.3g} GB/s; fitted to {self.num_rows} rows of {names}, "
            f"median error of rows left out {self.median_error:.0%}"
        )


@cache
def rl_efficiency() -> RlEfficiency:
    """The table that comes with Phalanx."""
    content = (files("phalanx.cost") / TABLE).read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(content)
    return RlEfficiency(**{each.name: table[each.name] for each in fields(RlEfficiency)})
