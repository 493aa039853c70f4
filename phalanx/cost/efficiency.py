"""How far published steps stay behind the formula of `cost.cluster_step`, by class of rows.

One table for all machines and models, made by `benchmarks/cluster_efficiency.py` from published
training rows; never fitted to a row. It is what turns a formula into hours with bars.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from phalanx.hardware import Machine

CLASSES = {
    "adapters": "LoRA on GPUs",
    "full": "pretraining on GPUs",
    "tpu": "pretraining on TPUs",
}


@dataclass(frozen=True)
class Efficiency:
    """Formula over published step time.

    Attributes:
        name: of the class, a key of `CLASSES`.
        median: of the medians of sources.
        low, high: 10th and 90th percentile of rows, every source weighing the same.
        num_rows, num_sources: published rows behind it.
        note: what the class is of, where it is not of this work.
    """

    name: str
    median: float
    low: float
    high: float
    num_rows: int
    num_sources: int
    note: str = ""

    def step_s(self, formula_s: float) -> tuple[float, float, float]:
        """(expected, least, most) seconds of a step that the formula says takes `formula_s`."""
        return formula_s / self.median, formula_s / self.high, formula_s / self.low

    def describe(self) -> str:
        """One line: the numbers and where they come from."""
        text = (
            f"formula / {self.median:.2f} ({self.low:.2f} to {self.high:.2f}): median and 10th to "
            f"90th percentile of {self.num_rows} published rows of {CLASSES[self.name]} from "
            f"{self.num_sources} sources"
        )
        return f"{text}; {self.note}" if self.note else text


@cache
def efficiency_of(machine: Machine, method: str) -> Efficiency:
    """The class that a machine and a method ("lora", "full", "pretrain") belong to."""
    is_tpu = machine.cores_per_device > 0
    name = "tpu" if is_tpu else "adapters" if method == "lora" else "full"
    content = (files("phalanx.cost") / "efficiency.json").read_text(encoding="utf-8")
    entry = json.loads(content)["classes"][name]
    note = "no published row of LoRA on TPUs was found" if is_tpu and method == "lora" else ""
    return Efficiency(
        name=name,
        median=entry["median"],
        low=entry["p10"],
        high=entry["p90"],
        num_rows=entry["num_rows"],
        num_sources=len(entry["rows_of_sources"]),
        note=note,
    )
