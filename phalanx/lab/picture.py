"""Predicted against measured, with the constant-MFU baseline beside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.errors import JobError
from phalanx.lab.scored import Point, Validation

# Okabe and Ito's colours, which colour-blind readers can tell apart; shapes tell the same.
_STYLES = {
    "grid": ("#999999", "."),
    "vendor-tuned": ("#0072B2", "o"),
    "moe": ("#D55E00", "^"),
    "lora": ("#009E73", "s"),
    "rl": ("#CC79A7", "v"),
    "other": ("#E69F00", "D"),
    "ttft_s": ("#D55E00", "^"),
    "tpot_s": ("#0072B2", "o"),
    "latency_s": ("#009E73", "s"),
}
_NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "latency_s": "request latency"}
_GIB = 2.0**30


def draw(found: Validation, path: str) -> None:
    """Write the picture.

    Raises:
        JobError: `environment/missing` without matplotlib; `cli/file` when it cannot be written.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        rule = "needs matplotlib: pip install 'phalanx-parallel[report]'"
        raise JobError("environment/missing", "--picture", path, rule) from None
    steps = [point for point in found.points if point.quantity == "step_s"]
    memory = [point for point in found.points if point.quantity == "memory_bytes"]
    serving = [point for point in found.points if point.quantity in _NAMES]
    figure, axes = plt.subplots(2, 2, figsize=(9, 9))
    _panel(axes[0, 0], steps, _predicted, "step time, Phalanx", "s", "row_class")
    _panel(axes[0, 1], steps, _baseline, "step time, constant-MFU baseline", "s", "row_class")
    _panel(axes[1, 0], memory, _predicted, "peak memory, Phalanx", "GiB", "row_class", _GIB)
    _panel(axes[1, 1], serving, _predicted, "serving, Phalanx", "s", "quantity")
    figure.tight_layout()
    try:
        figure.savefig(Path(path), dpi=110, metadata={"Software": None})
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise JobError("cli/file", "--picture", path, f"cannot be written: {reason}") from error
    finally:
        plt.close(figure)


def _predicted(point: Point) -> float:
    return point.predicted.value


def _baseline(point: Point) -> float:
    return point.baseline


def _panel(
    axes: Any,
    points: Sequence[Point],
    value: Callable[[Point], float],
    title: str,
    unit: str,
    coloured_by: str,
    scale: float = 1.0,
) -> None:
    axes.set_title(title)
    axes.set_xlabel(f"measured, {unit}")
    axes.set_ylabel(f"predicted, {unit}")
    shown = [point for point in points if value(point) > 0]  # not NaN
    if not shown:
        axes.text(0.5, 0.5, "no rows", ha="center", transform=axes.transAxes)
        return
    for name in dict.fromkeys(getattr(point, coloured_by) for point in shown):
        of_name = [point for point in shown if getattr(point, coloured_by) == name]
        x = np.array([point.measured for point in of_name]) / scale
        y = np.array([value(point) for point in of_name]) / scale
        colour, marker = _STYLES.get(name, ("#000000", "x"))
        label = f"{_NAMES.get(name, name)} ({len(of_name):,})"
        order = 1 if name == "grid" else 2
        axes.scatter(
            *(x, y), s=9, c=colour, marker=marker, alpha=0.55, linewidths=0, label=label,
            zorder=order,
        )  # fmt: skip
    both = [each / scale for point in shown for each in (point.measured, value(point))]
    ends = np.array([min(both) / 1.3, max(both) * 1.3])
    axes.plot(ends, ends, color="black", linewidth=0.8, zorder=3)
    axes.fill_between(ends, ends / 1.2, ends * 1.2, color="black", alpha=0.07, linewidth=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_aspect("equal")
    axes.legend(loc="upper left", fontsize=8, frameon=False, markerscale=1.5)
