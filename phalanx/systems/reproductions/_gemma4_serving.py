"""A serving engine of Gemma 4 31B on the two clusters of arXiv 2605.25645, in virtual time.

A decoding step takes a constant and the time to read the cache at 60 % of the bandwidth of all
chips together; a prompt 2 FLOP per parameter of the layers and token, at a share m of their peak.
The policy is `serve/prefill_first`. One set of inputs for all rows: nothing is fitted to a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean, median
from typing import Any, NamedTuple

from phalanx.bench_load import Sample
from phalanx.cost.serving import EngineCost
from phalanx.models.config import DecoderConfig
from phalanx.models.spec import kv_bytes, kv_token_bytes
from phalanx.planner.serving import arrivals, play_load
from phalanx.policies.serve.prefill_first import PrefillFirst
from phalanx.systems.reproductions._gemma4_models import layer_params
from phalanx.worlds.sim_serving import BLOCK_TOKENS

READ_FRAC = 0.6  # of memory bandwidth, for the cache
RATES = (0.0, 64.0, 32.0, 16.0, 8.0, 4.0, 2.0, 1.0)  # requests per second; 0: all at once
SEEDS = (0, 1, 2)
_TIED_RATE = 4.0  # the rate at which the paper gives times to first token
_NUM_PROMPTS = 30


@dataclass(frozen=True, kw_only=True)
class Servers:
    """A cluster that serves.

    Attributes:
        hardware: its name in the published rows.
        num_chips: how many.
        flops_per_s, bytes_per_s: of all chips together: peak, and memory bandwidth.
        kv_itemsize: bytes of a cached number.
        step_s: of a decoding step beside reading the cache.
        keeps_all: whether layers with a window keep and read every token all the same.
    """

    hardware: str
    num_chips: int
    flops_per_s: float
    bytes_per_s: float
    kv_itemsize: int
    step_s: float
    keeps_all: bool = False

    def cost(self, config: DecoderConfig, prefill_frac: float) -> EngineCost:
        """Prices of its steps, with prompts at that share of the peak."""
        prompt_s = 2.0 * layer_params(config) / (prefill_frac * self.flops_per_s)
        itemsize_frac = self.kv_itemsize / 2.0  # the config's cache is bfloat16
        read_s = itemsize_frac / (READ_FRAC * self.bytes_per_s)
        uniform = kv_token_bytes(config)

        @cache
        def cached_s(kv_len: int) -> float:
            return read_s * (uniform * kv_len if self.keeps_all else kv_bytes(config, kv_len))

        def batch_s(plan: Any) -> float:
            if plan.kv_len[0] == 0:  # one whole prompt
                return prompt_s * plan.num_tokens
            return self.step_s + sum(map(cached_s, plan.kv_len))

        return EngineCost(batch_s)


class Load(NamedTuple):
    """Requests of a benchmark: how many, prompt and output tokens of each."""

    num_requests: int
    prompt: int
    output: int


class Seen(NamedTuple):
    """Of a load: output tokens per second, medians of TTFT and TPOT in seconds."""

    tokens_per_s: float
    ttft_s: float
    tpot_s: float


def play(
    cost: EngineCost, load: Load, rate_per_s: float = 0.0, seed: int = 0, kv_tokens: int = 0
) -> Seen:
    """One load in virtual time; with `kv_tokens` a cache of so many tokens, else room for all."""
    all_tokens = load.num_requests * (load.prompt + load.output + BLOCK_TOKENS)
    samples = play_load(
        PrefillFirst(),
        cost,
        sent_s=arrivals(load.num_requests, rate_per_s, seed),
        prompt_lens=[load.prompt] * load.num_requests,
        output_tokens=load.output,
        num_blocks=(kv_tokens or all_tokens) // BLOCK_TOKENS,
        max_running=load.num_requests,
        max_step_tokens=max(load.num_requests, load.prompt),
    )
    return _seen(samples)


def _seen(samples: Sequence[Sample]) -> Seen:
    duration_s = max(each.output_s[-1] for each in samples)
    tokens = sum(each.num_output for each in samples)
    tpots = [t for each in samples if (t := each.tpot_s) is not None]
    return Seen(tokens / duration_s, median(each.ttft_s for each in samples), median(tpots))


@dataclass(frozen=True)
class Sweep:
    """Of the rates 1 to 64 and all at once, means over seeds: the best output tokens per second,
    and the medians of TTFT and TPOT at 4 requests per second."""

    peak_tokens_per_s: float
    ttft_s: float
    tpot_s: float


def sweep(servers: Servers, config: DecoderConfig, prompt: int, output: int, frac: float) -> Sweep:
    """30 prompts at each rate and seed; rates that cannot be the best are not played."""
    cost, load = servers.cost(config, frac), Load(_NUM_PROMPTS, prompt, output)
    least_s = (output - 1) * servers.step_s  # the last request takes no less
    peak, tied = 0.0, Seen(0.0, 0.0, 0.0)
    for rate in RATES:
        moments = [arrivals(load.num_requests, rate, seed)[-1] for seed in SEEDS]
        bound = mean(load.num_requests * output / (last_s + least_s) for last_s in moments)
        if bound < peak and rate != _TIED_RATE:
            continue
        seeds = SEEDS if rate else SEEDS[:1]
        seen = [play(cost, load, rate, seed) for seed in seeds]
        peak = max(peak, mean(each.tokens_per_s for each in seen))
        if rate == _TIED_RATE:
            tied = Seen(*(mean(values) for values in zip(*seen)))
    return Sweep(peak, tied.ttft_s, tied.tpot_s)


def solved(
    servers: Servers, config: DecoderConfig, frac: float, load: Load, tpot_s: float
) -> Servers:
    """The same servers with the constant of a step that makes a load's median TPOT `tpot_s`.

    All requests come at once, so every step of the load gets longer by what is added.
    """
    without = play(replace(servers, step_s=0.0).cost(config, frac), load)
    return replace(servers, step_s=tpot_s - without.tpot_s)
