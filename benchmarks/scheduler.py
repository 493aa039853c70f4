"""What one decision of a serving scheduler costs at 256 running and 2,000 queued requests.

    python benchmarks/scheduler.py --json FILE

Three situations: every running request decodes; each step 4 requests end and others join; the pool
is short, so that requests are preempted and come back. Exits with 1 when the median of a situation
is above 200 us.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from gated import main

from phalanx.mesh import Mesh
from phalanx.policy import Event, React, View
from phalanx.registry import build
from phalanx.report import Report

LIMIT_S = 200e-6
NUM_RUNNING, NUM_QUEUED = 256, 2000
BLOCK_TOKENS = 16
PROMPT, OUTPUT = 100, 4000  # requests that outlive the measurement unless they are ended


@dataclass(frozen=True)
class Situation:
    """Attributes:
    num_blocks: of the pool.
    num_ending: requests that end (and arrive) with every step.
    """

    name: str
    num_blocks: int
    num_ending: int = 0


SITUATIONS = (
    Situation("all decode", num_blocks=200_000),
    Situation("4 of 256 end and others join", num_blocks=200_000, num_ending=4),
    Situation("blocks run out, some are preempted", num_blocks=1_900, num_ending=1),
)


def decisions(policy: React, situation: Situation) -> Iterator[float]:
    """Seconds of each decision of an engine that is full from the start."""
    facts: dict[str, Any] = {
        "num_blocks": situation.num_blocks,
        "free_blocks": situation.num_blocks,
        "block_tokens": BLOCK_TOKENS,
        "max_running": NUM_RUNNING,
        "max_step_tokens": 2048,
    }
    view = View(mesh=Mesh(engine=1), facts=facts)
    state = policy.start(view)
    known = dict.fromkeys(range(NUM_RUNNING + NUM_QUEUED), PROMPT)
    cached = dict.fromkeys(known, 0)
    events = [_arrival(request) for request in known]
    next_request = len(known)
    while True:
        begin = perf_counter()
        actions = policy.on(state, events, view)
        yield perf_counter() - begin
        plan: Any = actions[0].batch  # type: ignore[attr-defined]
        cached.update(dict.fromkeys(plan.preempted, 0))
        accepted = []
        for request, query_len, _ in plan.rows():
            cached[request] += query_len
            accepted.append(int(cached[request] == known[request]))
            known[request] += accepted[-1]
        data = {"requests": plan.requests, "accepted": accepted}
        events = [Event(kind="step", time_s=0.0, label=actions[0].label, data=data)]
        for request in plan.requests[: situation.num_ending]:
            del known[request], cached[request]
            events.append(Event(kind="finish", time_s=0.0, item=request))
            known[next_request], cached[next_request] = PROMPT, 0
            events.append(_arrival(next_request))
            next_request += 1
        held = sum(-(-length // BLOCK_TOKENS) for length in cached.values())
        facts["free_blocks"] = situation.num_blocks - held


def _arrival(request: int) -> Event:
    data = {"prompt_len": PROMPT, "max_new": OUTPUT}
    return Event(kind="arrive", time_s=0.0, item=request, data=data)


def warm_decision_s(
    situation: Situation, policy: React | None = None, num_steps: int = 400
) -> tuple[float, float]:
    """Median and 99th percentile of the decisions after the pool of running requests has filled."""
    policy = policy or build("serve", "continuous")
    run = decisions(policy, situation)
    fill = 40
    times = sorted([next(run) for _ in range(fill + num_steps)][fill:])
    return median(times), times[int(0.99 * (len(times) - 1))]


def add_rows(report: Report, num_steps: int = 400) -> None:
    """One gated row per situation, for this and other benchmarks."""
    for situation in SITUATIONS:
        middle_s, slow_s = warm_decision_s(situation, num_steps=num_steps)
        note = f"{NUM_RUNNING} running, {NUM_QUEUED} queued; median of {num_steps} decisions"
        gate = {"target": LIMIT_S, "bound": "below", "note": note}
        report.add(f"serving decision: {situation.name}", middle_s, "s", "measured", **gate)
        name = f"serving decision: {situation.name}, 99th percentile"
        report.add(name, slow_s, "s", "measured")


def run() -> Report:
    """The report."""
    report = Report("Decisions of the serving scheduler")
    add_rows(report)
    return report


if __name__ == "__main__":
    sys.exit(main(run, __doc__))
