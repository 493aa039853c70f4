"""Published rows of the Gemma 4 report, by what they are of."""

from __future__ import annotations

from phalanx.systems._published import Published, published

V5P, V6E, H100 = "TPU v5p-8", "TPU v6e-8", "2x H100"


def said(experiment: str, metric: str, hardware: str = "", setting: str = "") -> Published:
    """The row of that experiment and metric, by the start of its hardware and a part of its
    configuration."""
    for row in published("gemma4-tpu"):
        is_it = row.experiment == experiment and row.metric == metric
        if is_it and row.hardware.startswith(hardware) and setting in row.configuration:
            return row
    raise LookupError(f"no published row: {experiment}, {metric}, {hardware}, {setting}")


def value_of(experiment: str, metric: str, hardware: str = "", setting: str = "") -> float:
    """Its number."""
    number = said(experiment, metric, hardware, setting).number
    assert number is not None
    return number
