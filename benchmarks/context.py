"""How much a layout of tokens saves the slowest rank, with real attention.

    python benchmarks/context.py --json FILE

One process on one core computes the attention of every rank, forward and backward, one rank after
the other, as no machine with two cores runs four ranks at once. A ring waits in each round for its
slowest rank; ranks that have gathered their keys wait once. Times are processor time, medians of
interleaved repeats. Beside them stands what the pairs of queries and keys predict.

Gates: a ring of 4 ranks with 2,048 tokens each is 1.5 to 1.95 times as fast with the head-tail
layout as with contiguous blocks (by pairs 1.75); of a packed row with one long document the
measured gain of cutting every document is that of the pairs within 25 %.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import date
from statistics import median
from time import process_time

import torch
from gated import main

from phalanx.doctor.machine import num_cores, processor_name
from phalanx.layout.context_part import ContextPart
from phalanx.layout.token_layout import KeysSeen
from phalanx.ops.partial_attention import partial_attention, partial_attention_backward
from phalanx.report import Report

RANKS, TOKENS = 4, 8192
HEADS, KV_HEADS, CHANNELS = 2, 1, 64
REPEATS = 5
LONG_DOCUMENT = (0, 512, 6656, 7168)  # one of 6,144 tokens, the others of 512 and 1,024
Visit = tuple[KeysSeen, int]  # what a rank's queries see of so many keys


def ring_rounds(layout: str) -> list[list[Visit]]:
    """Of each round, what each rank does."""
    parts = [ContextPart.of_row(layout, rank, RANKS, (0,), TOKENS) for rank in range(RANKS)]
    keys = TOKENS // RANKS
    return [
        [(part.keys_seen((part.rank - step) % RANKS, None), keys) for part in parts]
        for step in range(RANKS)
    ]


def gathered_round(layout: str) -> list[list[Visit]]:
    """The only round of ranks that have all keys of a packed row."""
    parts = [
        ContextPart.of_row(layout, rank, RANKS, LONG_DOCUMENT, TOKENS) for rank in range(RANKS)
    ]
    return [[(part.row_seen(None), TOKENS) for part in parts]]


def attention_s(visit: Visit) -> float:
    """Processor time of a visit, forward and backward."""
    seen, num_keys = visit
    if not seen.num_pairs:
        return 0.0
    generator = torch.Generator().manual_seed(0)

    def drawn(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, CHANNELS, generator=generator).bfloat16()

    q, grad = (drawn(len(seen.first_Q), HEADS) for _ in range(2))
    k, v = (drawn(num_keys, KV_HEADS) for _ in range(2))
    start = process_time()
    out, lse = partial_attention(q, k, v, seen, scale=CHANNELS**-0.5)
    partial_attention_backward(grad, q, k, v, out, lse, seen, scale=CHANNELS**-0.5)
    return process_time() - start


def slowest_of_rounds(rounds: list[list[Visit]], cost: Callable[[Visit], float]) -> float:
    """Sum over rounds of what the slowest rank takes."""
    return sum(max(map(cost, visits)) for visits in rounds)


def add_layouts(
    report: Report, what: str, rounds: dict[str, list[list[Visit]]], base: str
) -> dict[str, tuple[float, float]]:
    """Rows of each layout; returns how often it is as fast as `base`: (by pairs, measured)."""
    times_s = {name: [] for name in rounds}
    for _ in range(1 + REPEATS):  # the first warms up
        for name, visits in rounds.items():
            times_s[name].append(slowest_of_rounds(visits, attention_s))
    found = {name: median(times[1:]) for name, times in times_s.items()}
    pairs = {
        name: slowest_of_rounds(visits, lambda visit: visit[0].num_pairs)
        for name, visits in rounds.items()
    }
    ratios = {}
    for name in rounds:
        report.add(f"{what}, {name}: pairs of the slowest ranks", pairs[name], "1", "formula")
        report.add(f"{what}, {name}: attention", found[name], "s", "measured")
        ratios[name] = pairs[base] / pairs[name], found[base] / found[name]
    return ratios


def make_report() -> Report:
    """Measure both."""
    torch.set_num_threads(1)
    report = Report("Layouts of tokens over context ranks")
    report.notes["machine"] = f"{processor_name()}, {num_cores()} cores, {date.today()}"
    report.notes["work"] = f"{TOKENS:,} tokens on {RANKS} ranks, bfloat16, one core"
    layouts = ("contiguous", "striped", "head_tail")
    ring = add_layouts(report, "ring", {n: ring_rounds(n) for n in layouts}, "contiguous")
    quantity = "ring of {} / ring of contiguous blocks: speed"
    for name in layouts[1:]:
        by_pairs, measured = ring[name]
        report.add(quantity.format(name), by_pairs, "1", "formula")
        gate = {"target": 1.725, "tolerance": 0.225} if name == "head_tail" else {}
        report.add(quantity.format(name), measured, "1", "measured", **gate)
    layouts = ("head_tail", "per_document", "balanced")
    packed = add_layouts(report, "packed row", {n: gathered_round(n) for n in layouts}, "head_tail")
    quantity = "packed row, {} / head_tail: speed"
    for name in layouts[1:]:
        by_pairs, measured = packed[name]
        report.add(quantity.format(name), by_pairs, "1", "formula")
        gate = {"target": by_pairs, "tolerance_frac": 0.25} if name == "per_document" else {}
        report.add(quantity.format(name), measured, "1", "measured", **gate)
    return report


if __name__ == "__main__":
    sys.exit(main(make_report, __doc__))
