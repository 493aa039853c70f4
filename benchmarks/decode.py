"""Decode steps of Gemma 3 270M on this machine against the speed at which it reads memory.

    python benchmarks/decode.py --json FILE

A step is one of the serving engine: a batch plan in, tokens out, with head, choice and Python.
Every round reads two buffers with all threads and takes a step of each kind, so that whatever else
the machine does falls on all alike. A share of the read bandwidth is the median over rounds of
(bytes that the step must read / its time) / (bandwidth of that round). One buffer has the size of
the weights, the other is larger than any cache. Exits with 1 when a gated row misses.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from datetime import date
from statistics import median
from time import perf_counter

import torch
from gated import main

from phalanx.doctor.machine import num_cores, processor_name
from phalanx.engines.serve.engine import ServeEngine
from phalanx.engines.serve.kv import PagedKv
from phalanx.engines.serve.kv_room import KvLimits
from phalanx.engines.serve.model import PackedDecoder
from phalanx.engines.serve.settings import Request, Sampling
from phalanx.errors import JobError
from phalanx.models.demo import ensure_demo_model
from phalanx.models.hf import read_tensors
from phalanx.models.spec import (
    DecoderConfig,
    canonical_tensors,
    kv_bytes,
    read_config,
    small_config,
    weight_bytes,
)
from phalanx.ops import native
from phalanx.policies.serve import BatchPlan
from phalanx.report import Report

SEQUENCES = (1, 8, 16)
PROMPT, ROUNDS = 64, 11
MIN_SHARE = 0.7  # of the read bandwidth, at one sequence
LARGE_BYTES = 3 << 29


def loaded_model() -> tuple[PackedDecoder, str]:
    """The demo model, or random weights of its size where its package is missing."""
    try:
        folder = ensure_demo_model(lambda text: print(text, file=sys.stderr))
    except JobError:
        config = small_config(
            vocab_size=262_144,
            hidden_size=640,
            intermediate_size=2048,
            num_layers=18,
            num_heads=4,
            num_kv_heads=1,
            head_dim=256,
            window=512,
            full_every=6,
            dtype="bfloat16",
        )
        model = PackedDecoder(config)
        specs = canonical_tensors(config).values()
        model.update((each.name, torch.randn(each.shape) * 0.02) for each in specs)
        return model, "random weights of the size of Gemma 3 270M"
    model = PackedDecoder(read_config(folder).with_dtype("bfloat16"))
    model.update(read_tensors(folder))
    return model, folder.name


class Decoding:
    """An engine whose requests have their prompts in the cache.

    Args:
        model: filled weights.
        num_requests: live at once; every step decodes the first few.
    """

    def __init__(self, model: PackedDecoder, num_requests: int) -> None:
        most = PROMPT + 2 * len(SEQUENCES) * (ROUNDS + 2)
        limits = KvLimits(max_tokens=most, max_running=num_requests, max_step_tokens=PROMPT)
        kv = PagedKv(model.config, num_requests * most, limits, dtype=torch.bfloat16)
        self.engine = ServeEngine(model, kv, limits, "base")
        sampling = Sampling(max_new=most - PROMPT, ignore_eos=True)
        for request in range(num_requests):
            prompt = [5 + (7 * at + 31 * request) % 1000 for at in range(PROMPT)]
            self.engine.add(Request(request, prompt, PROMPT, sampling))
            self.step([request])

    def step(self, requests: list[int]) -> float:
        """Seconds of one step of these requests."""
        held = [self.engine.kv.length(each) for each in requests]
        new = [len(self.engine.requests[each].tokens) - have for each, have in zip(requests, held)]
        none = [-1] * len(requests)
        plan = BatchPlan(requests, new, held, [0] * len(requests), none, none)
        start_s = perf_counter()
        self.engine.step(plan)
        return perf_counter() - start_s

    def bytes_read(self, config: DecoderConfig, requests: list[int]) -> int:
        """All weights once, and what each request's next token sees of the cache."""
        lengths = (self.engine.kv.length(each) + 1 for each in requests)
        return weight_bytes(config) + sum(kv_bytes(config, length) for length in lengths)


def read_bytes_per_s(words: torch.Tensor) -> float:
    """Of one pass over a buffer with all threads."""
    start_s = perf_counter()
    if native.levels():
        native.read_all(words)
    else:
        words.sum()
    return words.nbytes / (perf_counter() - start_s)


def run() -> Report:
    """Interleaved rounds, medians."""
    model, name = loaded_model()
    decoding = Decoding(model, max(SEQUENCES))
    like_weights = torch.ones(weight_bytes(model.config) // 8, dtype=torch.int64)
    large = torch.ones(LARGE_BYTES // 8, dtype=torch.int64)
    read: dict[str, list[float]] = {"of the weights' size": [], "larger than caches": []}
    steps: dict[tuple[int, str], list[float]] = {
        (count, how): [] for count in SEQUENCES for how in ("compiled", "plain")
    }
    shares: dict[int, list[float]] = {count: [] for count in SEQUENCES}
    for _ in range(ROUNDS):
        read["of the weights' size"].append(read_bytes_per_s(like_weights))
        read["larger than caches"].append(read_bytes_per_s(large))
        for (count, how), seconds in steps.items():
            requests = list(range(count))
            num_bytes = decoding.bytes_read(model.config, requests)
            with nullcontext() if how == "compiled" else native.plain():
                seconds.append(decoding.step(requests))
            if how == "compiled":
                bandwidth = read["of the weights' size"][-1]
                shares[count].append(num_bytes / seconds[-1] / bandwidth)
    return report_of(name, read, steps, shares)


def report_of(
    name: str,
    read: dict[str, list[float]],
    steps: dict[tuple[int, str], list[float]],
    shares: dict[int, list[float]],
) -> Report:
    """Rows of all that was measured, without the first round, which warms up."""
    report = Report("Decode steps of Gemma 3 270M in bfloat16")
    threads, levels = torch.get_num_threads(), native.levels() or ["no compiler"]
    report.notes["machine"] = f"{processor_name()}, {num_cores()} cores, {date.today()}"
    report.notes["work"] = f"{name}, {threads} threads, {levels[0]}, prompts of {PROMPT} tokens"
    for size, values in read.items():
        report.add(f"read bandwidth, buffer {size}", median(values[1:]), "B/s", "measured")
    for (count, how), seconds in steps.items():
        step_s = median(seconds[1:])
        note = f"{count / step_s:.1f} tokens per second"
        report.add(f"step, sequences: {count}, {how}", step_s, "s", "measured", note=note)
    for count, values in shares.items():
        gate = {"target": MIN_SHARE, "bound": "above"} if count == 1 else {}
        note = "(bytes of weights and cache / step) / bandwidth, buffer of the weights' size"
        quantity = f"share of the read bandwidth, sequences: {count}"
        report.add(quantity, median(values[1:]), "1", "measured", note=note, **gate)
    return report


if __name__ == "__main__":
    sys.exit(main(run, __doc__))
