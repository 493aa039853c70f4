"""What a published row measured, in seconds and bytes."""

from __future__ import annotations

import re

from phalanx.cost.model_shape import ModelShape
from phalanx.cost.training_plans import TrainingPlans
from phalanx.lab.csv_rows import CsvRow

_KNOWN_RULE = "pre-july-2025 flop rule"
_FAILURES = r"crash|\boom\b|_oom|out of memory|fail|error|killed"


def has_failed(row: CsvRow) -> bool:
    """Whether the run crashed or ran out of memory, by the words of its status; others ended."""
    return bool(re.search(_FAILURES, row.words("status")))


def step_s(row: CsvRow, shape: ModelShape | None, plans: TrainingPlans | None) -> float | None:
    """Seconds of a step: as printed, or from tokens per second, or from FLOP/s by a known rule.

    Conventions of FLOPs differ between sources, so these count only where the notes name MaxText's
    rule before July 2025: 6 per weight and token, and attention without its causal half.
    """
    printed = row.number("step_time_s")
    if printed:
        return printed
    devices = row.count("n_devices")
    if not devices or plans is None:
        return None
    tokens = float(plans.step_tokens)
    rate = row.number("tokens_per_s_per_device")
    if rate:
        return tokens / (rate * devices)
    teraflops = row.number("tflops_per_device")
    if not teraflops or shape is None or _KNOWN_RULE not in row.words("notes"):
        return None
    per_token = shape.product_flops_per_token + shape.head_flops_per_token
    per_token += shape.attention_flops(1.0, float(plans.row_tokens))
    return 3 * per_token * tokens / (teraflops * 1e12 * devices)


def memory_bytes(row: CsvRow) -> float | None:
    """What the run's log gave as its peak.

    In the unit that the row names; nanotron divides torch's peak by 1024^3 and prints "GB".
    """
    value = row.number("memory_gb")
    if not value:
        return None
    is_binary = "gib" in row.words("memory_kind") or "nanotron" in row.words("framework")
    return value * (2**30 if is_binary else 1e9)
