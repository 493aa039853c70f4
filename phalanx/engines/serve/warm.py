"""The first steps of an engine: they warm its kernels and say what a step costs.

Probes are requests that nobody asked for. Each round times every kind of step once, so that what
else the machine does falls on all alike; the first round only warms up where there is another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from phalanx.cost.serving import ServeRates, windows_of
from phalanx.engines.serve.blocks import num_blocks_of
from phalanx.engines.serve.engine import ServeEngine
from phalanx.engines.serve.settings import Request, Sampling

_PROBE = Sampling(max_new=2, ignore_eos=True)  # never at its end, so that its row can be looked at
_COUNTERS = ("num_steps", "num_prompt_tokens", "num_output_tokens", "num_preempted")
_MOST_ROUNDS = 9
# prompt tokens of a step, and the share of the time allowed that the one before may take at most:
# what lies beyond is extrapolated
_CHUNKS = ((32, 1.0), (128, 1.0), (512, 0.04))
_LONG_TOKENS, _LONG_ROWS = 512, 8  # cached tokens of rows that read much, and how many rows


def measure_rates(engine: ServeEngine, *, allowed_s: float = 0.8) -> ServeRates:
    """Measure what the steps of an engine without requests cost; it is left as it was.

    Args:
        engine: weights and an empty cache.
        allowed_s: from the first two steps on; no round but the first starts later, so a large
            model takes longer.
    """
    assert not engine.requests, "rates are measured before the first request"
    counters = {name: getattr(engine, name) for name in _COUNTERS}
    try:
        return _measure(engine, allowed_s)
    finally:
        for name, value in counters.items():
            setattr(engine, name, value)


def _measure(engine: ServeEngine, allowed_s: float) -> ServeRates:
    probes = _Probes(engine)
    probes.write_cache()
    probes.first_steps()
    start_s = perf_counter()
    chunks = probes.chunks(allowed_s)
    steps = _steps(probes, chunks)
    rounds: list[dict[str, float]] = []
    while len(rounds) < _MOST_ROUNDS and (not rounds or perf_counter() - start_s < allowed_s):
        rounds.append({name: probes.time_s(*step) for name, step in steps.items()})
    return _rates(probes, chunks, rounds[1:] or rounds)


def _steps(probes: _Probes, chunks: Sequence[int]) -> dict[str, tuple[int, int, int, bool]]:
    """The kinds of steps that are timed: (rows, tokens of each, cached, whether they are whole)."""
    many, reading = probes.num_rows, probes.num_reading
    steps = {
        "one": (1, 1, 0, False),
        "one whole": (1, 1, 0, True),
        "many": (many, 1, 0, False),
        "many whole": (many, 1, 0, True),
        "short": (reading, 1, 0, False),
        "long": (reading, 1, probes.num_cached, False),
        "late": (1, chunks[0], probes.num_cached, False),
    }
    return steps | {f"chunk {count}": (1, count, 0, False) for count in chunks}


def _rates(
    probes: _Probes, chunks: Sequence[int], rounds: Sequence[Mapping[str, float]]
) -> ServeRates:
    """Medians; differences are taken within a round, where both saw the same machine."""

    def typical(longer: str, shorter: str = "") -> float:
        each = [one[longer] - (one[shorter] if shorter else 0.0) for one in rounds]
        return max(0.0, median(each))

    many = probes.num_rows
    layers = {count: typical(f"chunk {count}") for count in chunks if count > many}
    layers |= {1: typical("one"), many: typical("many")}
    head = {1: typical("one whole", "one"), many: typical("many whole", "many")}
    windows = windows_of(probes.engine.model.config)
    num_read = sum(share * min(probes.num_cached, w or probes.num_cached) for w, share in windows)
    return ServeRates(
        layers_s=_rising(layers),
        head_s=_rising(head),
        kv_token_s=typical("long", "short") / (probes.num_reading * num_read),
        pair_s=typical("late", f"chunk {chunks[0]}") / (chunks[0] * num_read),
        windows=windows,
    )


def _rising(points: Mapping[int, float]) -> list[tuple[int, float]]:
    """More rows never take less time; where a measurement says so it is noise."""
    most, rising = 0.0, []
    for count in sorted(points):
        most = max(most, points[count])
        rising.append((count, most))
    return rising


@dataclass(frozen=True, slots=True)
class _Plan:
    """A step of plain probes; legal by the way it is made."""

    requests: Sequence[int]
    query_len: int
    kv_len: int
    num_draft: Sequence[int] = ()
    adapter: Sequence[int] = ()
    grammar: Sequence[int] = ()
    preempted: Sequence[int] = ()

    def rows(self) -> list[tuple[int, int, int]]:
        return [(request, self.query_len, self.kv_len) for request in self.requests]

    def require_legal(self, max_running: int, max_step_tokens: int) -> None:
        return


class _Probes:
    """Steps of requests that nobody asked for, with ids below 0.

    Attributes:
        num_rows: rows of a step that the engine's limits and blocks allow.
        num_cached: tokens of a row that reads much from the cache.
        num_reading: how many such rows fit.
    """

    def __init__(self, engine: ServeEngine) -> None:
        self.engine, self._limits, blocks = engine, engine.limits, engine.kv.num_blocks
        self.num_rows = min(self._limits.max_running, self._limits.max_step_tokens, blocks)
        self._shortest = min(
            _CHUNKS[0][0], self._limits.max_step_tokens, self._limits.max_tokens - 1
        )
        self.num_cached = min(_LONG_TOKENS, self._limits.max_tokens - self._shortest)
        rows = blocks // num_blocks_of(self.num_cached + 1)
        self.num_reading = max(1, min(rows, self.num_rows, _LONG_ROWS))

    def first_steps(self) -> None:
        """A prompt and a decoding step: kernels may be compiled now, which can take a minute."""
        self.time_s(1, self._shortest, 0, True)
        self.time_s(self.num_rows, 1, 0, True)

    def chunks(self, allowed_s: float) -> list[int]:
        """Prompt lengths to be timed, rising."""
        most = min(self._limits.max_step_tokens, self._limits.max_tokens)
        chunks = [self._shortest]
        for count, share in _CHUNKS[1:]:
            if count > most or self.time_s(1, chunks[-1], 0, False) > share * allowed_s:
                break
            chunks.append(count)
        return chunks

    def time_s(self, num_rows: int, query_len: int, kv_len: int, is_whole: bool) -> float:
        """Seconds of a step of fresh requests.

        Args:
            num_rows: requests.
            query_len: tokens that each computes.
            kv_len: tokens that each has in the cache.
            is_whole: whether each gets its next token, for which the head runs.
        """
        self._admit(num_rows, kv_len + query_len + (not is_whole))
        self._extend(kv_len)
        plan = _Plan(list(self.engine.requests), query_len, kv_len)
        self._settle()
        start_s = perf_counter()
        self.engine.step(plan)
        self._settle()
        took_s = perf_counter() - start_s
        self._forget()
        return took_s

    def write_cache(self) -> None:
        """Give the blocks that rows will read memory of their own: pages never written are one."""
        self._admit(self.num_reading, 1)
        self._extend(self.num_cached, write=True)
        self._forget()

    def _admit(self, num_rows: int, num_known: int) -> None:
        vocab_size = self.engine.model.config.vocab_size
        for at in range(num_rows):
            tokens = [(at + 7 * place) % vocab_size for place in range(num_known)]
            request = Request(-1 - at, tokens, num_known, _PROBE)
            self.engine.requests[request.id] = request

    def _forget(self) -> None:
        for request in list(self.engine.requests):
            self.engine.cancel(request)

    def _extend(self, kv_len: int, *, write: bool = False) -> None:
        """As prompts would: one request after the other, no more at once than a step computes."""
        kv, most = self.engine.kv, self._limits.max_step_tokens
        for request in self.engine.requests if kv_len else ():
            for start in range(0, kv_len, most):
                count = min(most, kv_len - start)
                kv.extend([request], [count])
                if write:
                    self._write(request, count)

    def _write(self, request: int, count: int) -> None:
        steps, device = self.engine.kv.step([request], [count]), self.engine.model.device
        for name, pool in self.engine.kv.pools.items():
            shape = (count, pool.kind.num_kv_heads, pool.kind.head_dim)
            values_SKC = torch.randn(shape, device=device)
            for layer in range(len(self.engine.model.config.kv_layers(name))):
                pool.write(layer, steps[name], values_SKC, values_SKC)

    def _settle(self) -> None:
        if self.engine.model.device.type == "cuda":
            torch.cuda.synchronize(self.engine.model.device)
