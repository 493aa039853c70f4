"""Striped Attention: the theoretical speed-ups of every printed row, work per rank, bytes.

Gated: what follows from arithmetic, at the precision of the print, and that no measured speed-up is
above what whole tiles of a kernel leave of it. Rows of the paper's tables stand one by one, those
of its appendices are counted. Real ranks are compared with one process in the tests and timed in
`benchmarks/context.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

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
from phalanx.systems.reproductions._striped_tiles import tiled_speedup

_VOCABULARY = 32_000
_MESH = re.compile(r"mesh (\d+)x(\d+).*seq (\d+)")
_PAIRS = {"contiguous": 57_408, "striped": 33_024, "head_tail": 32_832}  # slowest rank, N 4, S 512


class _Size(NamedTuple):
    layers: int
    width: int
    ffn_width: int


_SIZES = {"1B": _Size(22, 2048, 5504), "3B": _Size(26, 3200, 8640), "7B": _Size(32, 4096, 11_008)}
_TF32_WEIGHT = {"A100": 2.0, "TPU": 1.0}  # attention in TF32 on A100, in one precision on TPU
_TILES = {"A100": (2048, 4096), "TPU": (2048, 2048)}  # queries and keys, section 4
_PAPER = "Striped Attention (arXiv 2311.09431) "
_Of = TypeVar("_Of")


def reproduce() -> Report:
    """Rows of arXiv 2311.09431 beside ours."""
    report = Report("Striped Attention (arXiv 2311.09431)")
    _work(report)
    report.rows += measured("striped-attention")
    _speedups(report)
    report.notes["not reproduced"] = (
        "wall times on A100 and TPU (kernels of other devices); the throughput of attention alone "
        "that a later implementation prints (flash kernels of CUDA); whole tiles on TPU v3 "
        "(appendix A.2), where up to 5 % more was measured than tiles of 2,048 by 2,048 leave"
    )
    return report


def _speedups(report: Report) -> None:
    seen = {_key(row): row for row in _rows("training throughput speedup")}
    errors: dict[str, list[float]] = {}
    shares: dict[str, list[float]] = {}
    for row in _rows("theoretical max speedup"):
        theirs, ours = seen[_key(row)], _speedup(row)
        assert row.number is not None and theirs.number is not None
        where = row.source.removeprefix(_PAPER)
        errors.setdefault(where, []).append(abs(ours - row.number))
        shares.setdefault(where, []).append(theirs.number / ours)
        if "Table" in where:
            _add_row(report, row, theirs, ours)
    for where, distances in errors.items():
        note = f"{len(distances)} rows"
        quantity = f"{where}: largest distance of a printed theoretical speed-up"
        report.add(quantity, max(distances), "1", "formula", target=0.005, bound="below", note=note)
        quantity = f"{where}: largest measured speed-up / theoretical one"
        report.add(
            quantity,
            max(shares[where]),
            "1",
            "published",
            target=1.0,
            tolerance=0.01,
            bound="below",
            note=note,
        )


def _add_row(report: Report, row: Published, theirs: Published, ours: float) -> None:
    """A printed row: what pairs say, and what whole tiles leave beside what was measured."""
    mesh = row.configuration.replace(" (model x sequence parallel)", "")
    where = f"{row.model}, {row.hardware}, {mesh}"
    quantity = f"most speed-up over contiguous blocks, {where}"
    note = "printed with two digits"
    report.add(quantity, ours, "1", "formula", target=row.number, tolerance=0.005, note=note)
    report.rows.append(row.row(quantity, "1"))
    quantity = f"speed-up by whole tiles, {where}"
    note = "a bound: kernels are as fast on every tile, nothing else takes time"
    report.add(
        quantity, _tiled(row), "1", "formula", target=theirs.number, bound="above", note=note
    )
    report.rows.append(theirs.row(quantity, "1"))


def _rows(metric: str) -> list[Published]:
    rows = published("striped-attention")
    return [row for row in rows if row.metric == metric and _MESH.search(row.configuration)]


def _key(row: Published) -> tuple[str, str, str, str]:
    return row.experiment, row.model, row.hardware, row.configuration


def _ring(row: Published) -> tuple[int, int]:
    """Ranks of the ring, tokens of a row."""
    found = _MESH.search(row.configuration)
    assert found is not None
    return int(found[2]), int(found[3])


def _speedup(row: Published) -> float:
    ranks, tokens = _ring(row)
    size = _SIZES[row.model]
    return float(
        striped_speedup(
            ranks,
            tokens,
            layers=size.layers,
            width=size.width,
            linear_flops=gpt_linear_flops(*size, _VOCABULARY),
            attention_weight=_of_hardware(row, _TF32_WEIGHT),
        )
    )


def _tiled(row: Published) -> float:
    """With the three matrices of a feed-forward that the models have."""
    size, weight = _SIZES[row.model], _of_hardware(row, _TF32_WEIGHT)
    third_matrix = 2 * size.layers * size.width * size.ffn_width
    return tiled_speedup(
        *_ring(row),
        _of_hardware(row, _TILES),
        linear_flops=gpt_linear_flops(*size, _VOCABULARY) + third_matrix,
        pair_flops=4 * size.width * size.layers * weight,
    )


def _of_hardware(row: Published, table: Mapping[str, _Of]) -> _Of:
    return next(value for name, value in table.items() if name in row.hardware)


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
