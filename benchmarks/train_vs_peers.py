"""A LoRA step of Gemma 3 270M beside the loops that a user would write or pick.

    python benchmarks/train_vs_peers.py [--quick] [--only MODULE ...] [--json FILE]

Same model, same packed rows of question-and-answer chats, same targets; every peer in processes of
its own, steps interleaved, medians and quartiles of paired ratios. Peak memory is PSS above what
the imports take. Exits with 1 when a gate misses.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import median, quantiles

from peers.case import Case, Row
from peers.drive import Peer, interleave

from phalanx.data.batches import SampleStream, step_batch
from phalanx.data.prepare import prepare
from phalanx.doctor.machine import num_cores, processor_name
from phalanx.errors import GateError
from phalanx.job import load_job, parse_flags
from phalanx.models.source import data_settings, model_source
from phalanx.report import Report

ROW_TOKENS = 512
OURS, GATED = "phalanx_engine", "transformers_counted"
ALONE = ("transformers_peft", GATED, "transformers_counted_bf16", "trl_default", OURS)
PAIRS = (("transformers_fsdp", "phalanx_fsdp"), ("tensor_script", "phalanx_tensor"))
COUNTED = (0.15, 1.0)
SPEED_GATES = {0.15: 1.5, 1.0: 1.3}
MEMORY_GATE, LIMIT_GATE, LIMIT_TOKENS = 0.6, 0.7, 4096


def main() -> int:
    """Measure, print, gate."""
    options = _options()
    report = Report("LoRA step of Gemma 3 270M against peers")
    report.notes["machine"] = f"{processor_name()}, {num_cores()} cores, {date.today()}"
    report.notes["work"] = f"{options.tokens} tokens a step, rows of {ROW_TOKENS}"
    lines = [_HEAD]
    with tempfile.TemporaryDirectory() as folder:
        for counted in options.counted:
            case = chat_case(options.tokens, counted, 1 + options.rounds)
            path = Path(folder) / f"case-{counted}.npz"
            case.save(path)
            chosen = [name for name in ALONE if name in options.only or not options.only]
            lines += compare(report, case, path, chosen, counted, options)
            for pair in PAIRS:
                chosen = [name for name in pair if name in options.only or not options.only]
                if chosen and not options.quick:
                    lines += compare(report, case, path, chosen, counted, options)
    print(f"{report.notes['machine']}; {report.notes['work']}\n")
    print("\n".join(lines))
    for line in _gates_as_text(report):
        print(line)
    if options.json:
        report.save(options.json)
    try:
        report.require_gates()
    except GateError as error:
        print(f"error[{error.code}]: {error}", file=sys.stderr)
        return error.exit_code
    return 0


_HEAD = (
    "| counted | loop | counted tokens/s | all tokens/s | step (s) | CPU-s per step | peak memory "
    "(GB) | speed against the gated loop |\n|---|---|---|---|---|---|---|---|"
)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the versioned report there")
    parser.add_argument("--quick", action="store_true", help="the gated loop and ours, 2 rounds")
    parser.add_argument("--only", nargs="*", default=[], help="modules of benchmarks/peers")
    parser.add_argument("--counted", type=float, nargs="*", default=COUNTED, help="shares")
    parser.add_argument("--tokens", type=int, default=0, help="of a step (4096; quick: 2048)")
    parser.add_argument("--rounds", type=int, default=0, help="steps that count (5; quick: 2)")
    parser.add_argument("--threads", type=int, default=0, help="of all processes of a peer")
    options = parser.parse_args()
    options.threads = options.threads or num_cores()
    options.tokens = options.tokens or (2048 if options.quick else 4096)
    options.rounds = options.rounds or (2 if options.quick else 5)
    if options.quick and not options.only:
        options.only = [GATED, OURS]
    return options


def chat_case(tokens: int, counted_frac: float, num_steps: int) -> Case:
    """Packed chats; of every document the last `counted_frac` of its tokens are targets."""
    flags = ["--model.name", "gemma3-270m", "--data.max_tokens", str(ROW_TOKENS)]
    job = load_job(None, parse_flags([*flags, "--data.too_long", "drop"]))
    source = model_source(job)
    stream = SampleStream(prepare(data_settings(job, source.config), source.tokenizer_folder).train)
    steps, sizes, start = [], [], 0
    for _ in range(num_steps):
        batch = step_batch(
            stream,
            start,
            global_batch_tokens=tokens + ROW_TOKENS,  # one row may be left out below
            row_tokens=ROW_TOKENS,
            num_ranks=1,
            rank=0,
        )
        start = batch.next_sample
        rows = [
            _counted(each.tokens_S, each.document_starts, counted_frac)
            for each in batch.micro_batches
        ]
        if len(rows) % 2 and len(rows) > 1:  # two processes want as many rows each
            rows = rows[:-1]
        steps.append(tuple(rows))
        sizes.append(sum(len(row.tokens_S) for row in rows))
    return Case(source.folder, tuple(steps), tuple(sizes))


def _counted(tokens_S, starts, counted_frac: float) -> Row:
    import numpy as np

    bounds, at = (*starts, len(tokens_S)), []
    for start, end in itertools.pairwise(bounds):
        count = min(end - start - 1, max(1, round(counted_frac * (end - start))))
        at.extend(range(end - count, end))
    targets_at = np.asarray(at)
    return Row(tokens_S, tuple(starts), targets_at - 1, tokens_S[targets_at])


def compare(
    report: Report,
    case: Case,
    path: Path,
    modules: list[str],
    counted: float,
    options: argparse.Namespace,
) -> list[str]:
    """Rows of the table for these peers, side by side."""
    peers: list[Peer] = []
    try:
        for module in modules:
            num = importlib.import_module(f"peers.{module}").NUM_PROCESSES
            peers.append(Peer(module, num, max(1, options.threads // num), path))
        peers = [peer for peer in peers if _is_ready(peer, report)]
        if not peers:
            return []
        interleave(peers, options.rounds)
        lines = [_row(report, case, peer, counted, peers) for peer in peers]
        ours = next((peer for peer in peers if peer.module == OURS), None)
        if ours is not None:
            lines_of_limit(report, ours, path, counted, options)
        return lines
    finally:
        for peer in peers:
            peer.close()


def _is_ready(peer: Peer, report: Report) -> bool:
    try:
        peer.ready()
    except RuntimeError as error:
        report.notes[f"not run: {peer.module}"] = str(error)
        print(f"not run: {error}", file=sys.stderr)
        return False
    return True


def _row(report: Report, case: Case, peer: Peer, counted: float, peers: list[Peer]) -> str:
    module = importlib.import_module(f"peers.{peer.module}")
    measured, name = peer.measured, f"{module.NAME}, {counted:.0%} counted"
    sizes, counts = [], []
    for at, (tokens, targets) in enumerate(zip(measured.tokens, measured.counted), start=1):
        sizes.append(tokens or case.tokens_of_step[at])
        counts.append(targets or case.num_counted(at))
    total = median(size / step for size, step in zip(sizes, measured.step_s))
    scored = median(count / step for count, step in zip(counts, measured.step_s))
    peak = measured.peak_bytes
    report.add(f"tokens per second/{name}", total, "1/s", "measured")
    report.add(f"counted tokens per second/{name}", scored, "1/s", "measured")
    report.add(f"peak memory/{name}", peak, "bytes", "measured", note="PSS above imports")
    against = _against(report, peer, counted, peers)
    return (
        f"| {counted:.0%} | {module.NAME} | {scored:.0f} | {total:.0f} | "
        f"{median(measured.step_s):.2f} | {median(measured.cpu_s):.2f} | {peak / 1e9:.2f} | "
        f"{against} |"
    )


def _against(report: Report, peer: Peer, counted: float, peers: list[Peer]) -> str:
    base = next((each for each in peers if each.module == GATED), None) or peers[0]
    if base is peer:
        return "1"
    low, mid, high = _ratios(base.measured.step_s, peer.measured.step_s)
    by_cpu = median(a / b for a, b in zip(base.measured.cpu_s, peer.measured.cpu_s))
    if peer.module == OURS and base.module == GATED:
        note = f"quartiles {low:.2f} to {high:.2f}; by processor time {by_cpu:.2f}"
        gate = {"target": SPEED_GATES.get(counted), "bound": "above"}
        report.add(f"speed-up, {counted:.0%} counted", mid, "1", "measured", note=note, **gate)
        share = peer.measured.peak_bytes / base.measured.peak_bytes
        gate = {"target": MEMORY_GATE, "bound": "below"}
        report.add(f"peak memory, {counted:.0%} counted", share, "1", "measured", **gate)
    return f"{mid:.2f} ({low:.2f} to {high:.2f}); CPU {by_cpu:.2f}"


def _ratios(base: list[float], own: list[float]) -> tuple[float, float, float]:
    """Quartiles of the paired ratios."""
    ratios = [a / b for a, b in zip(base, own)]
    low, mid, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return low, mid, high


def lines_of_limit(
    report: Report, ours: Peer, path: Path, counted: float, options: argparse.Namespace
) -> None:
    """The share of the limit that our step reaches, and where the rest goes."""
    limit, rounds = Peer("limit", 1, options.threads, path), options.rounds
    try:
        limit.ready()
        shares, parts_of = [], []
        for number in range(1, 1 + min(rounds, 3)):
            best = limit.parts(number)
            ours.step(number)
            parts_of.append(ours.parts(number) | best)
            shares.append(best["limit_s"] / ours.measured.step_s.pop())
    finally:
        limit.close()
    parts = {name: median(each[name] for each in parts_of) for name in parts_of[0]}
    spent = ", ".join(
        f"{name} {parts[name] / parts['step']:.0%}"
        for name in ("products", "loss", "attention", "norms", "gate", "optimizer", "rest")
    )
    rate = parts["flops"] / parts["limit_s"] / 1e9
    note = f"limit {parts['limit_s']:.2f} s ({rate:.0f} GFLOP/s); our step: {spent}"
    # small steps are all overhead, so only large ones are held to the limit
    gate = {"target": LIMIT_GATE, "bound": "above"} if options.tokens >= LIMIT_TOKENS else {}
    name = f"share of the limit, {counted:.0%} counted"
    report.add(name, median(shares), "1", "measured", note=note, **gate)


def _gates_as_text(report: Report) -> list[str]:
    return [""] + [
        f"{row.quantity}: {row.value:.2f} (target {row.target}) {row.note}"
        for row in report.rows
        if row.quantity.startswith(("speed-up", "peak memory,", "share")) and row.value is not None
    ]


if __name__ == "__main__":
    sys.exit(main())
