"""Our parallel paths beside the plain torch script of the same model, on two processes.

    python benchmarks/parallel_vs_peers.py --json FILE

FSDP, tensor parallelism and a two-stage pipeline train Gemma 3 270M (LoRA, packed chats) beside
scripts that use torch's own pieces; steps are interleaved, ratios are medians of paired steps.
Two ranks that share rows of 4,096 tokens stand beside one rank with one thread that computes them
alone: the gain of context parallelism. Gates: 1.0 against every script, 1.5 against one rank.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import median, quantiles

import numpy as np
from gated import main
from peers.case import Case, Row
from peers.drive import Peer, interleave
from train_vs_peers import chat_case

from phalanx.doctor.machine import num_cores, processor_name
from phalanx.report import Report

ROUNDS, TOKENS, COUNTED = 3, 2048, 1.0
LONG_TOKENS = 4096
PAIRS = {
    "FSDP": ("transformers_fsdp", "phalanx_fsdp", 2),
    "tensor parallel": ("tensor_script", "phalanx_tensor", 2),
    "pipeline": ("pipeline_script", "phalanx_pipeline", 2),
}


def make_report() -> Report:
    """Measure all pairs."""
    report = Report("Parallel training against plain torch scripts")
    report.notes["machine"] = f"{processor_name()}, {num_cores()} cores, {date.today()}"
    report.notes["work"] = f"Gemma 3 270M, LoRA, {TOKENS} tokens a step, all counted"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case = chat_case(TOKENS, COUNTED, 1 + ROUNDS)
        path = folder / "case.npz"
        case.save(path)
        for what, (script, ours, processes) in PAIRS.items():
            add_pair(report, what, (script, ours), processes, path, gate=1.0)
        long = long_case(case)
        path = folder / "long.npz"
        long.save(path)
        what = f"2 context ranks, rows of {LONG_TOKENS:,}"
        add_pair(report, what, ("phalanx_engine", "phalanx_context"), 2, path, gate=1.5)
    return report


def add_pair(
    report: Report, what: str, modules: tuple[str, str], processes: int, path: Path, gate: float
) -> None:
    """Seconds of both, and the median of the paired ratios.

    Both get as many threads a process as cores allow to the larger of them, so that one rank beside
    two has half of the cores.
    """
    threads = max(1, num_cores() // processes)
    peers = []
    try:
        for module in modules:
            count = importlib.import_module(f"peers.{module}").NUM_PROCESSES
            peers.append(Peer(module, count, threads, path))
        for peer in peers:
            peer.ready()
        interleave(peers, ROUNDS)
    finally:
        for peer in peers:
            peer.close()
    for peer in peers:
        name = importlib.import_module(f"peers.{peer.module}").NAME
        step_s = median(peer.measured.step_s)
        report.add(f"step, {what}: {name}", step_s, "s", "measured")
        report.add(f"peak memory, {what}: {name}", peer.measured.peak_bytes, "bytes", "measured")
        print(f"{what}: {name}: {step_s:.2f} s", file=sys.stderr)
    ratios = [a / b for a, b in zip(*(peer.measured.step_s for peer in peers))]
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    report.add(
        f"speed over the other, {what}",
        median(ratios),
        "1",
        "measured",
        target=gate,
        bound="above",
        note=f"quartiles {low:.2f} to {high:.2f} of {len(ratios)} paired steps",
    )


def long_case(case: Case) -> Case:
    """One row of one long document in every step: the rows of `case` one after another."""
    steps = []
    for number in range(len(case.steps)):
        rows = [row for at in range(len(case.steps)) for row in case.rows(number + at)]
        tokens_S = np.concatenate([row.tokens_S for row in rows])[:LONG_TOKENS]
        counted_N = np.arange(LONG_TOKENS // 2, len(tokens_S) - 1)
        steps.append((Row(tokens_S, (0,), counted_N, tokens_S[counted_N + 1]),))
    return Case(case.model, tuple(steps), tuple(len(rows[0].tokens_S) for rows in steps))


if __name__ == "__main__":
    sys.exit(main(make_report, __doc__))
