"""Striped Attention: the theoretical speed-ups of every printed row, work per rank, bytes.

Gated: what follows from arithmetic, at the precision of the print. Measured speed-ups are shown
beside the formula, which bounds them from above; kernels skip whole tiles only, so short rows gain
less. Real ranks are compared with one process in the tests and timed in
`benchmarks/context_parallel.py`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from phalanx.cost.context_formulas import (
    contiguous_pairs,
    gpt_linear_flops,
    head_tail_pairs,
    striped_pairs,
    striped_speedup,
)
from phalanx.layout.token_layout import pairs_NN, token_layout
from phalanx.report import Report
from phalanx.systems._measured import measured
from phalanx.systems._published import Published, published
from phalanx.systems.reproductions._pictures import draw_rounds

_VOCABULARY = 32_000
_MESH = re.compile(r"mesh (\d+)x(\d+).*seq (\d+)")
_PAIRS = {"contiguous": 57_408, "striped": 33_024, "head_tail": 32_832}  # slowest rank, N 4, S 512


class _Size(NamedTuple):
    layers: int
    width: int
    ffn_width: int


_SIZES = {"1B": _Size(22, 2048, 5504), "3B": _Size(26, 3200, 8640), "7B": _Size(32, 4096, 11_008)}
_TF32_WEIGHT = {"A100": 2.0, "TPU": 1.0}  # attention in TF32 on A100, in one precision on TPU


def reproduce() -> Report:
    """Rows of arXiv 2311.09431 beside ours."""
    report = Report("Striped Attention (arXiv 2311.09431)")
    _speedups(report)
    _work(report)
    report.rows += measured("striped-attention")
    report.notes["not reproduced"] = (
        "wall times on A100 and TPU (kernels of other devices); the throughput of attention alone "
        "that a later implementation prints (flash kernels of CUDA)"
    )
    return report


def _speedups(report: Report) -> None:
    measured = {_key(row): row for row in _rows("training throughput speedup")}
    errors = []
    for row in _rows("theoretical max speedup"):
        speedup = _speedup(row)
        quantity = f"most speed-up over contiguous blocks, {row.model}, {row.hardware}, "
        quantity += row.configuration.replace(" (model x sequence parallel)", "")
        assert row.number is not None
        errors.append(abs(speedup - row.number))
        report.add(
            quantity,
            speedup,
            "1",
            "formula",
            target=row.number,
            tolerance=0.005,
            note="printed with two digits",
        )
        report.rows.append(row.row(quantity, "1"))
        seen = measured.get(_key(row))
        if seen is not None and seen.number is not None:
            report.add(
                f"{quantity}: measured by the authors / formula",
                seen.number / speedup,
                "1",
                "published",
                target=1.0,
                tolerance=0.01,
                bound="below",
                note=f"the formula is a bound; {seen.source}",
            )
    if errors:
        report.add(
            "largest distance of a printed theoretical speed-up",
            max(errors),
            "1",
            "formula",
            target=0.005,
            bound="below",
            note=f"{len(errors)} rows",
        )


def _rows(metric: str) -> list[Published]:
    rows = published("striped-attention")
    return [row for row in rows if row.metric == metric and _MESH.search(row.configuration)]


def _key(row: Published) -> tuple[str, str, str, str]:
    return row.experiment, row.model, row.hardware, row.configuration


def _speedup(row: Published) -> float:
    found = _MESH.search(row.configuration)
    assert found is not None
    _, ranks, tokens = map(int, found.groups())
    size = _SIZES[row.model]
    return float(
        striped_speedup(
            ranks,
            tokens,
            layers=size.layers,
            width=size.width,
            linear_flops=gpt_linear_flops(*size, _VOCABULARY),
            attention_weight=next(w for name, w in _TF32_WEIGHT.items() if name in row.hardware),
        )
    )


def _work(report: Report) -> None:
    """Pairs of the busiest of 4 ranks at 512 tokens: counted on real layouts, and by formula."""
    ranks, tokens = 4, 512
    formulas = {
        "contiguous": contiguous_pairs(ranks, tokens, ranks - 1),
        "striped": striped_pairs(ranks, tokens, ranks - 1),
        "head_tail": head_tail_pairs(ranks, tokens),
    }
    for kind, formula in formulas.items():
        quantity = f"pairs of the busiest rank, {ranks} ranks, {tokens} tokens, {kind}"
        report.add(quantity, float(formula), "1", "formula", target=float(_PAIRS[kind]))
        counted = max(pairs_of_ranks(kind, tokens, ranks))
        report.add(quantity, float(counted), "1", "simulated", target=float(formula))


def pairs_of_ranks(kind: str, tokens: int, ranks: int) -> list[int]:
    """Pairs that each rank computes of a causal row of one document."""
    return pairs_NN(token_layout(kind, tokens, ranks)).sum(axis=1).tolist()


def draw(path: str) -> None:
    """What each of four ranks computes in each round of a ring."""
    ranks, tokens = 4, 512
    rounds = {}
    for kind in _PAIRS:
        table = pairs_NN(token_layout(kind, tokens, ranks))
        rounds[kind] = [
            [int(table[j, (j - at) % ranks]) for j in range(ranks)] for at in range(ranks)
        ]
    title = f"{ranks} ranks, {tokens} tokens, causal: the slowest rank (line) decides every round"
    draw_rounds(rounds, title, path)
