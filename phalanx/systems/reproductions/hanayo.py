"""Hanayo: idle time, memory and messages of the real orders; throughput ratios of Figure 9.

Gated exactly: idle time, peak and hops of played orders against closed forms. The formula that the
paper prints is shown beside the exact one; they differ (`cost.pipeline_formulas`). Figure 9 is
gated within 10 %: for each machine the time of a hop is fitted to its three ratios at 4 stages and
used, unchanged in bytes, at 8 stages, where ratios are predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import log

from phalanx.cost.pipeline_formulas import (
    chimera_bubble,
    flush_idle_s,
    hanayo_bubble,
    hanayo_idle_s,
    hanayo_peak_chunks,
    hanayo_printed_bubble,
)
from phalanx.registry import build
from phalanx.report import Report
from phalanx.systems._measured import measured
from phalanx.systems._published import Published, published
from phalanx.systems.reproductions._pictures import draw_schedule
from phalanx.systems.reproductions._sleeping import AGREES_FRAC, ORDERS, asleep_s
from phalanx.worlds.pipeline_arrays import Played, Wired, play, wire

_FORWARD_S, _BACKWARD_S = 1.0, 2.0
_SIZES = [(ranks, waves) for ranks in (2, 3, 4, 8) for waves in (1, 2, 4, 8)]
_SIZES += [(16, 2), (32, 1), (32, 4)]
_FIGURE_1 = {"W=2": 2, "W=4": 4}
_HOPS = [step / 400 for step in range(0, 121)]  # of a rank's forward pass at 4 stages
_FITTED, _PREDICTED = "D=2;P=4", "D=1;P=8"


def reproduce() -> Report:
    """Rows of arXiv 2308.15762 beside ours."""
    report = Report("Hanayo (arXiv 2308.15762)")
    _idle(report)
    _theory(report)
    _figure_9(report)
    report.rows += measured("hanayo")
    _asleep(report)
    report.notes["not reproduced"] = (
        "Figure 8's variances and the out-of-memory cells of Figure 10 (sequence length and "
        "micro-batch are not published), Figure 10 to 12's absolute throughputs (rates of kernels)"
    )
    report.notes["hop"] = (
        "Figure 9: one number per machine, the time of a hop over that of a rank's forward pass, "
        "chosen on a grid to fit the three ratios at P=4; at P=8 a rank has half of the work, so "
        "the same hop weighs twice as much"
    )
    return report


@cache
def _wired(ranks: int, waves: int) -> Wired:
    """Hanayo with as many micro-batches as ranks; no waves: 1F1B."""
    order = build("pipeline", {"name": "hanayo", "waves": waves} if waves else {"name": "1f1b"})
    return wire(order.order(ranks, ranks))


def _played(ranks: int, waves: int, hop_s: float = 0.0) -> Played:
    chunks = 2 * waves or 1
    return play(_wired(ranks, waves), _FORWARD_S / chunks, _BACKWARD_S / chunks, hop_s)


def _idle(report: Report) -> None:
    """Idle seconds for all sizes; peak and hops at one of them."""
    far, fars = 0.0, 0
    for ranks, waves in _SIZES:
        played = _played(ranks, waves)
        idle_s = float(played.step_s[0]) - ranks * (_FORWARD_S + _BACKWARD_S)
        far = max(far, abs(idle_s - hanayo_idle_s(ranks, waves, _BACKWARD_S)))
        peaks = played.peak_in_flight.tolist()
        fars += peaks != [hanayo_peak_chunks(ranks, waves, rank) for rank in range(ranks)]
    sizes = f"{len(_SIZES)} sizes, P from 2 to 32, W from 1 to 8"
    report.add(
        f"distance from idle (P - 1) T_B / W, {sizes}",
        far,
        "s",
        "simulated",
        target=0.0,
        tolerance=1e-9,
    )
    report.add(
        f"sizes whose peaks are not (2W - 1) P + 1 + d, {sizes}", fars, "1", "simulated", target=0.0
    )
    ranks, waves = 8, 2
    row = next(row for row in published("hanayo") if row.experiment == "drawn schedule")
    quantity = f"length of a step in forward passes of a stage, P={ranks}, W={waves}"
    length = float(_played(ranks, waves).step_s[0]) * 2 * waves / _FORWARD_S
    assert row.number is not None
    report.add(quantity, length, "1", "simulated", target=row.number, tolerance=1e-9)
    report.rows.append(row.row(quantity, "1"))
    sent = sum(row.sends and row.step.kind == "F" for row in _wired(ranks, waves).rows)
    quantity = f"hops of a micro-batch per direction, P={ranks}, W={waves}"
    report.add(quantity, 2.0 * waves * (ranks - 1), "1", "formula", note="2 W (P - 1)")
    report.add(quantity, sent / ranks, "1", "simulated", target=2.0 * waves * (ranks - 1))


def _asleep(report: Report) -> None:
    """The measured steps of sleeping stages, simulated, with messages that take no time."""
    found = {row.quantity: row.value for row in report.rows if row.source == "measured"}
    for name in ORDERS:
        quantity = f"step, {name}, asleep, 4 processes"
        report.add(
            quantity,
            asleep_s(name, 4),
            "s",
            "simulated",
            target=found.get(quantity),
            tolerance_frac=AGREES_FRAC,
        )


def _theory(report: Report) -> None:
    """Figure 1: bubble shares without time for hops."""
    for row in published("hanayo"):
        if row.metric != "bubble ratio" or row.number is None:
            continue
        ranks = int(row.devices)
        quantity = f"bubble share, {row.configuration}, {ranks} ranks"
        report.rows.append(row.row(quantity, "1", 0.01))
        found = _theoretical(row.configuration, ranks)
        if found is None:
            continue
        name, formula, simulated = found
        report.add(
            quantity,
            formula,
            "1",
            "formula",
            target=row.number / 100,
            tolerance=0.002,
            note=name,
        )
        if simulated is not None:
            exact = f"{quantity}, exact"
            report.add(exact, simulated[0], "1", "formula", note="from the drawn schedules")
            report.add(exact, simulated[1], "1", "simulated", target=simulated[0], tolerance=1e-9)


def _theoretical(words: str, ranks: int) -> tuple[str, float, tuple[float, float] | None] | None:
    """What is said of it, its formula, and for Hanayo the exact share twice."""
    waves = next((n for name, n in _FIGURE_1.items() if name in words), 0)
    if waves:
        exact = hanayo_bubble(ranks, waves), _played(ranks, waves).idle_frac
        return "as the paper prints it", hanayo_printed_bubble(ranks, waves), exact
    if "gpipe" in words.lower() or "dapple" in words.lower():
        idle_s = flush_idle_s(ranks, _FORWARD_S, _BACKWARD_S)
        ideal_s = ranks * (_FORWARD_S + _BACKWARD_S)
        return "(P - 1) / (2P - 1)", idle_s / (idle_s + ideal_s), None
    if "chimera" in words.lower():
        return "one wave over half of the ranks", chimera_bubble(ranks), None
    return None


def _figure_9(report: Report) -> None:
    """Throughput over 1F1B on four machines: the hop fitted at 4 stages, predicted at 8."""
    rows = [
        row
        for row in published("hanayo")
        if (row.experiment, row.metric) == ("adaptability", "throughput")
    ]
    for machine in dict.fromkeys(row.hardware for row in rows):
        ratios = {
            where: _ratios([row for row in rows if row.hardware == machine], where)
            for where in (_FITTED, _PREDICTED)
        }
        hop = min(_HOPS, key=lambda each: _misfit(ratios[_FITTED], each))
        for where, wanted in ratios.items():
            ranks = int(where.rpartition("=")[2])
            for waves, (printed, row) in wanted.items():
                quantity = f"throughput / 1F1B, {machine}, {where}, W={waves}"
                report.add(
                    quantity,
                    _gain(ranks, waves, hop * ranks / 4),
                    "1",
                    "simulated",
                    target=printed,
                    tolerance_frac=0.1,
                    note=f"hop {hop:g} of a rank's forward pass at P=4"
                    + (", fitted here" if where == _FITTED else ", predicted here"),
                )
                report.add(quantity, printed, "1", "published", note=row.source)


def _ratios(rows: list[Published], where: str) -> Mapping[int, tuple[float, Published]]:
    """Waves -> throughput over that of 1F1B (DAPPLE)."""
    by_method = {
        row.configuration.partition("method=")[2]: row
        for row in rows
        if row.configuration.startswith(where)
    }
    base = by_method["dapple"].number
    assert base is not None
    return {
        int(name.partition("W=")[2]): (row.number / base, row)
        for name, row in by_method.items()
        if name.startswith("hanayo") and row.number is not None
    }


def _gain(ranks: int, waves: int, hop_s: float) -> float:
    """Step time of 1F1B over Hanayo's, for hops of so many seconds."""
    return float(_played(ranks, 0, hop_s).step_s[0] / _played(ranks, waves, hop_s).step_s[0])


def _misfit(wanted: Mapping[int, tuple[float, Published]], hop_s: float) -> float:
    return sum(log(_gain(4, waves, hop_s) / printed) ** 2 for waves, (printed, _) in wanted.items())


def draw(path: str) -> None:
    """Two waves over four ranks."""
    draw_schedule({"name": "hanayo", "waves": 2}, 4, 4, path)
