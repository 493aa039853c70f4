"""What is asked of engines that serve, and what is answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from phalanx.cost.bars import Bar
from phalanx.planner.clusters import AskedCluster
from phalanx.planner.request_trace import RequestTrace
from phalanx.planner.serve_events import PlayedRequests
from phalanx.planner.serve_split import SplitEngines


@dataclass(frozen=True, kw_only=True)
class ServeQuestion:
    """What is to be served.

    Attributes:
        prompt_tokens, output_tokens: of a request, on average.
        rate_per_s: arrivals (0: as many as can be served).
        requests: a trace instead of a rate.
        ttft_s, tpot_s: promised: of 99 in 100 requests to the first token; between tokens.
        precision: of the weights.
        software: of the engine, "family:generation".
        max_running: requests in a batch of one attention replica (0: as engines limit them).
        shared_tokens: of a prompt's first tokens, those that are the same in all, where no trace
            says which prompts begin alike.
        reuses_prefixes: whether engines keep a prefix cache.
        reused_tokens: of a prompt on average, what formulas take as found in it; `serve_answer`
            works it out.
    """

    prompt_tokens: float
    output_tokens: float
    rate_per_s: float = 0.0
    requests: RequestTrace | None = None
    ttft_s: float = np.inf
    tpot_s: float = np.inf
    precision: str = "bf16"
    software: str = "vllm"
    max_running: int = 0
    shared_tokens: int = 0
    reuses_prefixes: bool = True
    reused_tokens: float = 0.0

    @property
    def names_prefixes(self) -> bool:
        """Whether it is known which prompts begin alike."""
        if self.requests is None:
            return self.shared_tokens > 0
        return self.requests.prefixes is not None

    @property
    def longest_tokens(self) -> float:
        """Of a request with its answer."""
        longest = self.prompt_tokens + self.output_tokens
        if self.requests is None:
            return longest
        each = self.requests.prompt_tokens + self.requests.output_tokens
        return max(longest, float(each.max()))

    @property
    def promises(self) -> bool:
        """Whether a time is promised."""
        return bool(np.isfinite(self.ttft_s) or np.isfinite(self.tpot_s))

    @property
    def asked_per_s(self) -> float:
        """Arrivals of the rate or the trace; 0 where neither is given."""
        if self.requests is not None and np.isfinite(self.requests.rate_per_s):
            return self.requests.rate_per_s
        return self.rate_per_s


@dataclass(frozen=True, kw_only=True)
class Engines:
    """Equal engines on a cluster.

    Attributes:
        degrees: tensor, pipeline, expert, attention_dp.
        replicas, idle: engines, and devices that none takes.
        kv_tokens: that the caches of one engine hold.
        weight_bytes: of a device.
        max_running: requests in a batch of one engine.
        loaded: requests/s of the whole cluster that the times below are of.
        ttft_s, tpot_s, latency_s: means at that load.
        most_per_s: the most that meets the promises in the mean; knee_per_s: that can be served.
        parts: what a decoding step at that load is spent on -> seconds.
        keeps: whether it meets the promises at the rate asked.
    """

    degrees: dict[str, int]
    replicas: int
    idle: int
    kv_tokens: float
    weight_bytes: float
    max_running: int
    loaded: float
    ttft_s: Bar
    tpot_s: Bar
    latency_s: Bar
    most_per_s: float
    knee_per_s: float
    parts: dict[str, float]
    keeps: bool

    @property
    def bound_by(self) -> str:
        """What most of a decoding step is spent on."""
        return max(self.parts, key=lambda name: self.parts[name])


@dataclass(frozen=True, kw_only=True)
class ServeAnswer:
    """What one cluster can do.

    Attributes:
        output_tokens: of a request.
        best: None where nothing fits.
        counted: ways that were priced; too_large: of them, without room for one request.
        illegal: reason -> ways.
        played: requests against the best engines: of the trace, or at the rate (the highest that
            keeps the promises, where none is asked).
        played_per_s: their rate; kept_per_s: the highest whose 99th percentiles keep the promises
            (0: none does; None: nothing was promised); in_time: whether what was played did.
        split, split_degrees: engines for prompts beside engines for answers, where times are
            promised: the best such division, and how its engines are cut.
        source: where coefficients come from.
        reused_tokens: of a prompt on average, what formulas took as found in the prefix cache.
        without_reuse: formulas for the best engines without a prefix cache, where it holds some.
    """

    asked: AskedCluster
    output_tokens: float
    best: Engines | None
    counted: int
    too_large: int
    illegal: Counter[str]
    played: PlayedRequests | None = None
    played_per_s: float = 0.0
    kept_per_s: float | None = None
    in_time: bool = True
    split: SplitEngines | None = None
    split_degrees: Mapping[str, int] | None = None
    source: Sequence[str] = ()
    reused_tokens: float = 0.0
    without_reuse: ServeAnswer | None = None

    @property
    def fits(self) -> bool:
        """Whether it serves what is asked within the promises."""
        return self.best is not None and self.best.keeps and self.in_time

    @property
    def usd_per_million_output(self) -> float:
        """Dollars for a million output tokens at the rate played; infinite without a price."""
        assert self.best is not None
        served = min(self.played_per_s or self.best.loaded, self.best.knee_per_s)
        tokens_per_s = served * self.output_tokens
        return self.usd_per_h / 3600 / max(tokens_per_s, 1e-12) * 1e6

    def engines_for(self, per_s: float) -> int:
        """Engines like the best that serve so many requests a second, by the formulas' means."""
        assert self.best is not None
        each_per_s = min(self.best.most_per_s, self.best.knee_per_s) / self.best.replicas
        return ceil(per_s / max(each_per_s, 1e-12))

    @property
    def usd_per_h(self) -> float:
        """Of the whole cluster."""
        cluster = self.asked.cluster
        return cluster.num_devices * cluster.machine.usd_per_h
