"""Megatron-LM: sizes, FLOPs, memory, bubbles and days by formula, beside the three papers.

What follows from arithmetic is gated at the precision of what was printed. Throughput of whole runs
is shown beside the planner's price of the same plan and gates nothing here: `phalanx lab validate`
scores the planner on far more rows, these among them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.cost.memory_formulas import layer_activation_bytes
from phalanx.cost.training_formulas import (
    bubble_frac,
    gpt_params,
    hardware_flops,
    model_flops,
    training_days,
)
from phalanx.registry import build
from phalanx.report import Report
from phalanx.systems._measured import measured
from phalanx.systems._published import Published, published
from phalanx.systems.reproductions._pictures import draw_schedule
from phalanx.worlds.pipeline_arrays import play

PEAK_FLOPS = 312e12  # A100, as the papers divide by
_SEQ, _VOCAB = 2048, 51_200
_LAYER_MS = {"none": 19.6, "full": 27.2, "both": 20.3}  # arXiv 2205.05198, Table 4, 22B
_FIGURE_7 = {"22B": 0.161, "175B": 0.185, "530B": 0.202, "1T": 0.202}
_TENSOR = 8


@dataclass(frozen=True)
class Gpt:
    """A model as a row names it ("GPT 22B h=6144 a=64 l=48") and how it ran."""

    name: str
    hidden: int
    heads: int
    layers: int
    batch: int
    devices: int

    @staticmethod
    def of(row: Published) -> Gpt:
        """From the row's model and configuration."""
        sizes = {key: int(value) for key, value in re.findall(r"\b([hal])=(\d+)", row.model)}
        batch = re.search(r"\bbatch=(\d+)", row.configuration)
        return Gpt(
            row.model.split()[1],
            sizes["h"],
            sizes["a"],
            sizes["l"],
            int(batch[1]) if batch else 0,
            int(row.devices),
        )

    def flops(self, recompute: str = "") -> float:
        """Of an iteration: the model's, or the hardware's with recomputation."""
        sizes = (self.batch, _SEQ, self.layers, self.hidden, _VOCAB)
        return float(hardware_flops(*sizes, recompute) if recompute else model_flops(*sizes))


def reproduce() -> Report:
    """Rows of arXiv 1909.08053, 2104.04473 and 2205.05198 beside ours."""
    report = Report("Megatron-LM (arXiv 1909.08053, 2104.04473, 2205.05198)")
    _sizes(report)
    _days(report)
    _utilisation(report)
    _memory(report)
    _layer_fit(report)
    _bubbles(report)
    report.rows += measured("megatron-lm")
    report.notes["not reproduced"] = (
        "perplexities and accuracies (no training at this size here), throughput on V100 of 2019, "
        "operator fusion, the pictures whose values are not printed"
    )
    return report


def _rows(experiment: str, metric: str) -> Iterator[Published]:
    for row in published("megatron-lm"):
        if row.experiment == experiment and row.metric == metric and row.number is not None:
            yield row


def _sizes(report: Report) -> None:
    """Parameter counts of the SC'21 table, which its names print."""
    for row in _rows("weak scaling", "throughput per GPU"):
        gpt = Gpt.of(row)
        report.add(
            f"parameters, GPT {gpt.name}",
            float(gpt_params(gpt.layers, gpt.hidden, _VOCAB, _SEQ)) / 1e9,
            "1e9",
            "formula",
            target=float(gpt.name.removesuffix("B")),
            tolerance=0.05,
            note="gate: arXiv 2104.04473, Table 1",
        )


def _days(report: Report) -> None:
    for row, tokens, params, rate in zip(
        _rows("training time estimate", "time"), (300e9, 450e9), (175e9, 1e12), (140e12, 163e12)
    ):
        days = float(training_days(tokens, params, int(row.devices), rate))
        quantity = f"days to train {row.model} on {tokens / 1e9:.0f}e9 tokens, {row.devices} A100"
        note = "8 T P / (n X): with recomputation"
        # printed in whole days; the second is 0.8 below what its own inputs give
        report.add(
            quantity, days, "d", "formula", target=row.number, tolerance_frac=0.011, note=note
        )
        report.rows.append(row.row(quantity, "d"))


def _utilisation(report: Report) -> None:
    """MFU and HFU of the 2205.05198 table from its own seconds."""
    seconds = {
        Gpt.of(row).name: (Gpt.of(row), row.number)
        for row in _rows("iteration time", "iteration time")
        if "selective" in row.configuration
    }
    for metric, recompute in (("MFU", ""), ("HFU", "selective")):
        for row in _rows("iteration time", metric):
            gpt, step_s = seconds[Gpt.of(row).name]
            assert step_s is not None
            reached = gpt.flops(recompute) / (step_s * gpt.devices * PEAK_FLOPS)
            quantity = f"{metric}, GPT {gpt.name}, {gpt.devices} A100"
            report.add(
                quantity,
                100 * reached,
                "%",
                "formula",
                target=row.number,
                tolerance=0.3,
                note="from the published seconds",
            )
            report.rows.append(row.row(quantity, "%"))


def _memory(report: Report) -> None:
    """Sequence parallelism with selective recomputation against tensor parallelism alone."""
    for row in _rows("iteration time", "MFU"):
        gpt = Gpt.of(row)
        sizes = (_SEQ, 1, gpt.hidden, gpt.heads)
        plain = layer_activation_bytes(*sizes, tensor=_TENSOR)
        both = layer_activation_bytes(
            *sizes, tensor=_TENSOR, sequence_parallel=True, recompute="selective"
        )
        report.add(
            f"activations, sequence parallel + selective / tensor parallel, GPT {gpt.name}",
            float(both) / float(plain),
            "1",
            "formula",
            target=_FIGURE_7[gpt.name],
            tolerance=0.001,
            note="gate: 34 over (10 + 24/t + 5as/(ht)) t; the paper prints 'under 20 %' as a bar",
        )


def _layer_fit(report: Report) -> None:
    """22B: seconds of an iteration from those of a layer and what stands outside layers."""
    rows = {
        "full" if "full recompute" in row.configuration else "both": row
        for row in _rows("iteration time", "iteration time")
        if Gpt.of(row).name == "22B"
    }
    layers = Gpt.of(rows["full"]).layers
    rest = {
        name: (row.number or 0.0) - layers * _LAYER_MS[name] / 1e3 for name, row in rows.items()
    }
    outside_s = sum(rest.values()) / len(rest)
    for name, row in rows.items():
        quantity = f"iteration, GPT 22B, 8 A100, {row.configuration.rsplit(';', 1)[-1]}"
        report.add(
            quantity,
            layers * _LAYER_MS[name] / 1e3 + outside_s,
            "s",
            "formula",
            target=row.number,
            tolerance_frac=0.02,
            note=f"48 published layer times and {outside_s:.3f} s outside layers, the same in both",
        )
        report.rows.append(row.row(quantity, "s"))


def _bubbles(report: Report) -> None:
    """The real orders, played with equal stages and free messages."""
    for ranks, items, chunks in ((8, 64, 1), (8, 64, 3), (35, 70, 3)):
        name = {"name": "interleaved", "virtual": chunks} if chunks > 1 else "1f1b"
        played = play(build("pipeline", name).order(ranks, items), 1.0, 2.0)
        quantity = f"bubble over ideal time, p {ranks}, m {items}, v {chunks}"
        formula = float(bubble_frac(ranks, items, chunks))
        report.add(quantity, formula, "1", "formula", note="arXiv 2104.04473, section 2.2.2")
        report.add(quantity, played.bubble_frac, "1", "simulated", target=formula, tolerance=1e-9)


def draw(path: str) -> None:
    """Two chunks on each of four ranks."""
    draw_schedule({"name": "interleaved", "virtual": 2}, 4, 8, path)
