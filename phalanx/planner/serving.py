"""What clients of a server will see: its own scheduling policy, played in virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from phalanx.bench_load import Sample, summarise
from phalanx.cost.serving import EngineCost, ServeRates
from phalanx.drive import drive
from phalanx.errors import JobError
from phalanx.mesh import Mesh
from phalanx.models.spec import DecoderConfig, kv_token_bytes
from phalanx.policy import React
from phalanx.registry import build
from phalanx.report import Report
from phalanx.units import format_bytes
from phalanx.worlds.sim import SimWorld
from phalanx.worlds.sim_serving import BLOCK_TOKENS, SimEngine, SimRequest

# Of a client's rows, what a forecast of steps can say; tails belong to what else a machine does.
_FORECAST = (
    *("load/duration", "load/requests per second", "load/output tokens per second"),
    *("load/tokens per second", "load/TTFT median", "load/TPOT median", "load/latency median"),
)
# Of the front end per request: parsing, and the way to the engine (order of magnitude, 2 cores).
# It matters less by its size than by its order: the first request's step starts without the others.
REQUEST_S = 0.002


def predict_load(
    rates: ServeRates,
    config: DecoderConfig,
    *,
    scheduler: str | Mapping[str, Any],
    prompt_lens: Sequence[int],
    output_tokens: int,
    max_running: int,
    max_tokens: int,
    max_step_tokens: int,
    kv_tokens: int,
    rate_per_s: float = 0.0,
    seed: int = 0,
    request_s: float = REQUEST_S,
) -> Report:
    """A load test (`bench_load.load_test`) as it will be: every request runs to its length.

    Args:
        rates: of the engine on its machine (`engines.calibrate_serving`, `engines.serve.warm`).
        config: the served model.
        scheduler: policy of the family "serve", as in `plan.serve`.
        prompt_lens, output_tokens: tokens of each request.
        max_running, max_tokens, max_step_tokens: limits of the engine.
        kv_tokens: tokens that its cache is made for (`engines.serve.kv_room.kv_tokens`).
        rate_per_s, seed: Poisson arrivals, the same moments as `load_test` draws (0: all at once).
        request_s: of the front end for each request, one after another, before the engine has it.

    Returns:
        "serving/KV tokens" (formula): what the server will say; "load/..." (simulated): the rows of
        a load test that engine steps decide.

    Raises:
        JobError: `job/bad-value` for no requests or one longer than `max_tokens`; for the scheduler
            `registry/unknown` and `job/unknown-key`.
        PlanError: `plan/illegal` for a scheduler with options beyond the engine.
    """
    longest = max(prompt_lens, default=0) + output_tokens
    if not prompt_lens or min(*prompt_lens, output_tokens) < 1 or longest > max_tokens:
        rule = f"prompt and output must have 2..{max_tokens} tokens together"
        raise JobError("job/bad-value", "load", longest, rule, legal=[max_tokens])
    num_blocks, known = -(-kv_tokens // BLOCK_TOKENS), dict(enumerate(prompt_lens))
    samples = play_load(
        build("serve", scheduler, "plan.serve"),
        EngineCost(lambda batch: rates.batch_s(batch, known)),
        sent_s=arrivals(len(prompt_lens), rate_per_s, seed),
        request_s=request_s,
        prompt_lens=prompt_lens,
        output_tokens=output_tokens,
        num_blocks=num_blocks,
        max_running=max_running,
        max_step_tokens=max_step_tokens,
    )
    note = (
        f"engine steps, and {request_s * 1e3:g} ms of the front end for each request (assumption)"
    )
    note += "; tokenising texts and other programs on this machine are not in it"
    report = Report("Load test, forecast", notes={"load forecast": note})
    tokens = num_blocks * BLOCK_TOKENS
    per_token = kv_token_bytes(config)
    report.add(
        "serving/KV tokens",
        tokens,
        "1",
        "formula",
        note=f"holds {tokens // max_tokens} requests of {max_tokens} tokens; at most "
        f"{format_bytes(per_token)} a token",
    )
    for row in summarise(samples, max(each.output_s[-1] for each in samples)).rows:
        if row.quantity in _FORECAST:
            report.rows.append(replace(row, source="simulated", note=note))
    return report


def arrivals(count: int, rate_per_s: float, seed: int) -> list[float]:
    """When requests are sent, from the first one on: a Poisson process, or all at once (rate 0)."""
    random, due_s, moments = Random(seed), 0.0, []
    for _ in range(count):
        moments.append(due_s)
        due_s += random.expovariate(rate_per_s) if rate_per_s else 0.0
    return moments


def play_load(
    policy: React,
    cost: EngineCost,
    *,
    sent_s: Sequence[float],
    prompt_lens: Sequence[int],
    output_tokens: int,
    num_blocks: int,
    max_running: int,
    max_step_tokens: int,
    request_s: float = 0.0,
) -> list[Sample]:
    """What each request of a load sees of an engine that a policy drives, in virtual time.

    Args:
        policy: of the family "serve".
        cost: prices of its steps.
        sent_s: when each request is sent, rising.
        prompt_lens, output_tokens: tokens of each.
        num_blocks, max_running, max_step_tokens: limits of the engine.
        request_s: of the front end per request, one after another.
    """
    requests, free_s = [], 0.0
    for at, (moment_s, length) in enumerate(zip(sent_s, prompt_lens)):
        free_s = max(free_s, moment_s) + request_s
        requests.append(
            SimRequest(
                id=at,
                arrive_s=free_s,
                prompt_len=length,
                max_new=output_tokens,
                num_new=output_tokens,
            )
        )
    engine = SimEngine(
        requests, num_blocks=num_blocks, max_running=max_running, max_step_tokens=max_step_tokens
    )
    world = SimWorld(Mesh(engine=1), cost, facts=engine.facts, outcomes=engine.outcomes)
    world.post(*engine.arrivals())
    drive(world, reacts=[policy])
    return [
        Sample(moment_s, engine.token_s[each.id], each.prompt_len, output_tokens)
        for moment_s, each in zip(sent_s, requests)
    ]
