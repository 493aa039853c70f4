"""How far kernels, links and hosts of training stay behind their data sheets.

Numbers that formulas cannot give, fitted to published training rows by `benchmarks/fit_training.py`
and never to a row, a model or a plan. Each starts from an assumption (the defaults below), moved by
a factor at every level that a plan belongs to:

    all rows > family of the software > its generation
             > generation of the accelerator > accelerator > accelerator and precision

A factor multiplies a number, and the odds of a share. Levels without published rows have none, so
that an accelerator that nobody measured takes what its generation and its software reach.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from statistics import NormalDist
from typing import Any

from phalanx.cost.training_plans import TrainingPlans
from phalanx.hardware import Machine

TABLE = "training_efficiency.json"
SHARES = (
    *("repeated_products", "slowdown"),
    *("tensor_hidden", "context_hidden", "expert_hidden", "data_hidden", "pipeline_hidden"),
)
# software that has no published rows of its own -> the family whose kernels it runs
_SAME_AS = {
    **dict.fromkeys(("phalanx", "torchtitan", "fsdp", "accelerate", "trl", "axolotl"), "torch"),
    **dict.fromkeys(("nemo", "bridge", "mcore"), "megatron"),
    **dict.fromkeys(("deepspeed", "sailor", "gpt-neox"), "megatron-deepspeed"),
    **dict.fromkeys(("jax", "levanter", "t5x"), "maxtext"),
    "llm-foundry": "composer",
}
# standard deviation of the logarithm of `pace` at each level, as fits assume it before any row
PACE_SPREADS: Mapping[str, float] = {
    **{"family": 0.1, "software": 0.06},
    **{"generation": 0.1, "accelerator": 0.08, "precision": 0.08},
}
_NORMAL_95 = NormalDist().inv_cdf(0.95)
_UNFUSED = ("megatron-2022", "megatron-deepspeed")
_WIDE_RINGS = ("phalanx",)
_FUSED_ATTENTION = 23.0  # year of release from which Megatron keeps scores on chip


@dataclass(frozen=True, kw_only=True)
class StepEfficiency:
    """What `training_step` multiplies its formulas with; numbers, or arrays over rows.

    Attributes:
        product: share of the machine's matrix rate that a large product reaches.
        product_traffic: bytes that a product moves over its operands' and result's size.
        product_start_s: of a product beside its work: filling and draining the device.
        expert_start_s: the same of products of many experts at once.
        expert: rate of products of many experts over that of one product.
        attention: share of the 16-bit matrix rate that attention reaches on long rows.
        attention_start_tokens: keys whose time each query costs in addition.
        state: share of the 16-bit matrix rate that linear attention reaches.
        scores: times that scores move where attention writes them out: product, mask and softmax,
            dropout, product (`writes_scores`).
        stream: bytes of element-wise work over those of one fused pass.
        routed: the same of bringing tokens to their experts.
        adapter: time of adapters over that of adapters on all linear layers, unfused.
        cast: the same of conversions to narrow formats.
        gated_cast: passes over inputs and results of experts with a gate, beside these.
        launch_s: host seconds of an operator.
        link, network: share of the links' bandwidth that collectives reach.
        round_s, network_round_s: of a round of a collective, in and between domains.
        call_s: of a collective inside a layer, of the host or of waiting for the others.
        crowding: factor on calls and rounds of the tensor axis in a pipeline.
        tensor_hidden, context_hidden, expert_hidden, data_hidden, pipeline_hidden: share of this
            traffic that may run beside compute.
        slowdown: seconds that compute loses per second of traffic beside it.
        optimizer: bytes of the optimizer over those of one fused pass.
        repeated_products: share of products that selective recomputation repeats.
        gradient_bytes: of a gradient element on the links.
        stall_s: that a micro-batch waits for the slowest of very many domains.
        micro_s, step_s: of the host, of a micro-batch and of a step.
        pace: seconds of a step over those of the formula.
    """

    product: Any = 0.9
    product_traffic: Any = 1.5
    product_start_s: Any = 6e-6
    expert_start_s: Any = 3e-5
    expert: Any = 0.85
    attention: Any = 0.55
    attention_start_tokens: Any = 256.0
    state: Any = 0.1
    scores: Any = 6.0
    stream: Any = 1.5
    routed: Any = 2.0
    adapter: Any = 0.6
    cast: Any = 1.0
    gated_cast: Any = 3.0
    launch_s: Any = 8e-6
    link: Any = 0.8
    network: Any = 0.75
    round_s: Any = 4e-6
    network_round_s: Any = 2e-5
    call_s: Any = 2e-5
    crowding: Any = 1.0
    tensor_hidden: Any = 0.3
    context_hidden: Any = 0.5
    expert_hidden: Any = 0.1
    data_hidden: Any = 0.8
    pipeline_hidden: Any = 0.5
    slowdown: Any = 0.15
    optimizer: Any = 1.5
    repeated_products: Any = 0.1
    gradient_bytes: Any = 4.0
    stall_s: Any = 1e-4
    micro_s: Any = 1e-4
    step_s: Any = 1e-2
    pace: Any = 1.0


@dataclass(frozen=True)
class Level:
    """Factors that published rows of one key gave.

    Attributes:
        level, key: as the table names them ("accelerator", "h100").
        factors: field of `StepEfficiency` -> factor.
        num_rows, sources: behind them.
    """

    level: str
    key: str
    factors: Mapping[str, float]
    num_rows: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class FoundEfficiency:
    """What a machine and a software reach.

    Attributes:
        efficiency: the numbers.
        low, high: bounds of the 90 % bar over the expected step, `widened` for absent levels.
        bar: the class of rows whose cross-validated errors the bar is.
        levels: that the numbers come from.
        absent: levels that no published row belongs to.
    """

    efficiency: StepEfficiency
    low: float
    high: float
    bar: str
    levels: tuple[Level, ...]
    absent: tuple[str, ...]

    def describe(self) -> str:
        """One line."""
        known = ", ".join(f"{each.key} ({each.num_rows} rows)" for each in self.levels)
        text = f"efficiencies fitted to published rows: {known}"
        if self.absent:
            text += f"; no rows of {', '.join(self.absent)}, for which the bar is widened"
        return f"{text}; 90 % bar of {self.bar}, cross-validated"


def family_of(software: str) -> str:
    """The family whose published rows speak for a software "family:generation"."""
    family, _, generation = software.partition(":")
    family = _SAME_AS.get(family, family)
    year = re.match(r"(?:20)?(\d\d)\b", generation)
    if family == "megatron" and year and float(year[1]) < _FUSED_ATTENTION:
        return "megatron-2022"
    return family


def writes_scores(software: str) -> bool:
    """Whether attention is products of whole matrices; else its scores stay on chip."""
    return family_of(software) in _UNFUSED


def has_wide_rings(software: str) -> bool:
    """Whether a ring of context ranks carries gradients in float32; else in 16 bits. Of the program
    itself: its family only lends it kernels."""
    return software.partition(":")[0] in _WIDE_RINGS


def level_keys(machine: Machine, precision: str, software: str) -> dict[str, str]:
    """Level -> key, from the general to the special."""
    return {
        "all": "all",
        "family": family_of(software),
        "software": software,
        "generation": machine.generation or machine.name,
        "accelerator": machine.name,
        "precision": f"{machine.name} {precision}",
    }


def kind_of(method: str, has_experts: bool) -> str:
    """Kinds of training whose errors differ: "lora", "experts" or "dense"."""
    return "lora" if method == "lora" else "experts" if has_experts else "dense"


def moved(name: str, value: Any, factor: Any) -> Any:
    """A number times a factor; a share with its odds times the factor."""
    if name not in SHARES:
        return value * factor
    odds = value * factor
    return odds / (odds + 1 - value)


def efficiency_of(machine: Machine, plans: TrainingPlans, has_experts: bool) -> FoundEfficiency:
    """What the table says of a machine and the precision and software of plans."""
    table = _table()
    numbers = asdict(StepEfficiency())
    found, absent = [], []
    for level, key in level_keys(machine, plans.precision, plans.software).items():
        entry = _entry(table, level, key)
        if entry is None:
            absent.append((level, key))
            continue
        found.append(entry)
        for name, factor in entry.factors.items():
            numbers[name] = moved(name, numbers[name], factor)
    kind = kind_of(plans.method, has_experts)
    bar = next(name for name in _bar_names(plans.software, kind) if name in table["bars"])
    low, high = widened(
        table["bars"][bar]["low"], table["bars"][bar]["high"], [level for level, _ in absent]
    )
    levels, gone = tuple(found), tuple(key for _, key in absent)
    return FoundEfficiency(StepEfficiency(**numbers), low, high, bar, levels, gone)


def widened(low: float, high: float, absent: Sequence[str]) -> tuple[float, float]:
    """The bar of a plan some of whose levels have no rows: what those may add is added to it.

    Args:
        low, high: the 90 % bar where all levels have rows, over the expected step.
        absent: levels without rows; each moves `pace` by `PACE_SPREADS`, independently.
    """
    if not absent:
        return low, high
    more = _NORMAL_95 * math.hypot(*(PACE_SPREADS[level] for level in absent))
    return (
        math.exp(-math.hypot(math.log(min(low, 1.0)), more)),
        math.exp(math.hypot(math.log(max(high, 1.0)), more)),
    )


def _bar_names(software: str, kind: str) -> Iterator[str]:
    yield f"{kind} with {family_of(software)}"
    yield kind
    yield "all"


def _entry(table: Mapping[str, Any], level: str, key: str) -> Level | None:
    known = table["levels"].get(level, {})
    if level == "software":
        key = _nearest_generation(known, key)
    entry = known.get(key)
    if entry is None:
        return None
    return Level(level, key, entry["factors"], entry["rows"], tuple(entry["sources"]))


def _nearest_generation(known: Mapping[str, Any], software: str) -> str:
    """The newest known generation that is not newer; the oldest of all, where all are newer.

    Without a generation it is the newest.
    """
    family = family_of(software)
    mine = sorted((each for each in known if family_of(each) == family), key=_generation)
    if not mine or software in known:
        return software
    asked = _generation(software) if ":" in software else ()
    older = [each for each in mine if not asked or _generation(each) <= asked]
    return older[-1] if older else mine[0]


def _generation(software: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", software.partition(":")[2]))


@cache
def _table() -> Mapping[str, Any]:
    content = (files("phalanx.cost") / TABLE).read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(content)
    return loaded
