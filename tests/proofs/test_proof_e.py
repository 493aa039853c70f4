"""Proof e: one scheduler decides the same in virtual time, in an engine and on real processes.

Three requests, 3 KV blocks of 16 tokens, at most 16 tokens a step, prompts in chunks of 12; a step
costs 1 s and 1 s per token in virtual time. Request 1 is preempted when request 0 needs the third
block; request 2 arrives at 60 s, during step 7, and ends by itself before its limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from phalanx.action import Action, Compute, Program
from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.engines.serve.engine import ServeEngine
from phalanx.engines.serve.settings import Request, Sampling
from phalanx.engines.serve.world import EngineWorld
from phalanx.mesh import Mesh
from phalanx.policies.serve import BatchPlan
from phalanx.policies.serve.continuous import Continuous
from phalanx.policy import Event, View
from phalanx.trace import Trace
from phalanx.worlds.replay import EventReplay, RecordingWorld
from phalanx.worlds.sim import SimWorld
from phalanx.worlds.sim_serving import SimEngine, SimRequest
from tests.engines.serve_cases import ScriptedInbox, make_engine, prompt_of
from tests.ranks import current_store, run_ranks

PROMPTS = (30, 14, 5)
MOST = (4, 5, 3)  # output tokens at most
POLICY = Continuous(chunk=12)
LIMITS = {"max_running": 3, "max_step_tokens": 16}
# start, [(request, tokens, cached)], preempted
TIMELINE: list[tuple[float, list[tuple[int, int, int]], list[int]]] = [
    (0.0, [(0, 12, 0), (1, 4, 0)], []),
    (17.0, [(0, 12, 12), (1, 4, 4)], []),
    (34.0, [(0, 6, 24), (1, 6, 8)], []),  # first tokens of both
    (47.0, [(0, 1, 30), (1, 1, 14)], []),
    (50.0, [(0, 1, 31), (1, 1, 15)], []),
    (53.0, [(0, 1, 32)], [1]),  # 33 tokens need three blocks: request 1 loses its cache
    (55.0, [(1, 12, 0)], []),  # request 0 has ended; 14 + 3 known tokens are computed anew
    (68.0, [(1, 5, 12), (2, 5, 0)], []),
    (79.0, [(1, 1, 17), (2, 1, 5)], []),
]
FINISH_S = {0: 55.0, 1: 82.0, 2: 82.0}
ARRIVES_AFTER = (0, 0, 7)  # ended steps


class PerToken(TableCost):
    """One second a step and one per token."""

    def compute_s(self, action: Compute, rank: int) -> float:
        return 1.0 + action.num_tokens


def decisions(trace: Trace) -> list[tuple[str, list[tuple[int, int, int]], list[int]]]:
    """(label, rows, preempted) of every step in a recorded trace."""
    batches = trace.notes["recording"]["batches"]
    fields = [
        action["fields"]
        for batch in batches
        for decided in batch["decided"]
        for action in decided["actions"]
    ]
    plans = [BatchPlan(*each["batch"]) for each in fields]
    labels = [each["label"] for each in fields]
    return [(n, plan.rows(), list(plan.preempted)) for n, plan in zip(labels, plans)]


def expected() -> list[tuple[str, list[tuple[int, int, int]], list[int]]]:
    return [(f"step.{i}", rows, lost) for i, (_, rows, lost) in enumerate(TIMELINE, 1)]


def simulated() -> tuple[Trace, SimEngine]:
    requests = [
        SimRequest(id=i, arrive_s=at, prompt_len=PROMPTS[i], max_new=MOST[i], num_new=new)
        for i, (at, new) in enumerate(zip((0.0, 0.0, 60.0), (4, 5, 2)))
    ]
    engine = SimEngine(requests, num_blocks=3, **LIMITS)
    sim = SimWorld(Mesh(engine=1), PerToken({}), facts=engine.facts, outcomes=engine.outcomes)
    sim.post(*engine.arrivals())
    return drive(RecordingWorld(sim), reacts=[POLICY]), engine


def alone(prompt: Sequence[int], sampling: Sampling) -> list[int]:
    """Output of a request that has the engine for itself."""
    inbox = ScriptedInbox({0: [Request(0, list(prompt), len(prompt), sampling)]})
    drive(EngineWorld(make_engine(), inbox), reacts=[Continuous()])
    return inbox.tokens()[0]


def requests_of_tensors() -> list[Request]:
    """The three requests; the last one stops at its second token."""
    stop = alone(prompt_of(PROMPTS[2]), Sampling(max_new=2, ignore_eos=True))
    assert stop[0] != stop[1]
    samplings = [Sampling(max_new=n, ignore_eos=True) for n in MOST[:2]]
    samplings.append(Sampling(max_new=MOST[2], ignore_eos=True, stop_tokens=(stop[1],)))
    return [Request(i, prompt_of(n), n, samplings[i]) for i, n in enumerate(PROMPTS)]


def small_engine() -> ServeEngine:
    return make_engine(max_running=3, max_step_tokens=16, max_tokens=48, kv_tokens=48)


def arrival(request: Request) -> Event:
    data = {"prompt_len": len(request.tokens), "max_new": request.sampling.max_new}
    return Event(kind="arrive", time_s=0.0, item=request.id, data=data)


def test_three_requests_have_the_timeline_that_was_worked_out_by_hand():
    trace, engine = simulated()
    assert decisions(trace) == expected()
    assert trace.columns["start_s"].tolist() == [start_s for start_s, _, _ in TIMELINE]
    assert trace.columns["dur_s"].tolist() == [
        1.0 + sum(tokens for _, tokens, _ in rows) for _, rows, _ in TIMELINE
    ]
    assert engine.finish_s == FINISH_S
    assert engine.facts["free_blocks"] == 3


def test_a_real_engine_is_told_the_same_and_computes_what_each_request_computes_alone():
    requests = requests_of_tensors()
    want = [alone(r.tokens, r.sampling) for r in requests]
    inbox = ScriptedInbox({0: requests[:2], ARRIVES_AFTER[2]: requests[2:]})
    engine = small_engine()
    trace = drive(RecordingWorld(EngineWorld(engine, inbox)), reacts=[POLICY])
    assert decisions(trace) == expected()
    assert inbox.tokens() == dict(enumerate(want))
    assert [len(tokens) for tokens in want] == [4, 5, 2]
    assert engine.kv.num_free == 3 and engine.num_preempted == 1 and not engine.requests


def test_the_policy_depends_on_its_events_and_view_only():
    trace, _ = simulated()
    assert drive(EventReplay(Mesh(engine=1), trace), reacts=[POLICY]) is trace


class ServedRanks:
    """A world of several ranks around one engine each, with arrivals after so many steps."""

    def __init__(self, world: Any, requests: Sequence[Request]) -> None:
        self.world, self.mesh, self.ranks = world, world.mesh, world.ranks
        self._waiting = list(zip(ARRIVES_AFTER, requests))
        self._num_steps = 0

    def view(self, scope: str) -> View:
        return self.world.view(scope)

    def load(self, program: Program) -> None:
        self.world.load(program)

    def issue(self, actions: Sequence[Action]) -> None:
        self.world.issue(actions)

    def agree(self, scope: str, decide: Callable[[], list[Action]]) -> list[Action]:
        return self.world.agree(scope, decide)

    def next_events(self) -> list[Event]:
        events = []
        for event in self.world.next_events():
            if event.kind == "done" and event.rank == 0:
                self._num_steps += 1
                step = {"time_s": event.time_s, "label": event.label, "data": event.data}
                events.append(Event(kind="step", **step))
                events += [
                    Event(kind="finish", time_s=event.time_s, item=i) for i in event.data["ended"]
                ]
        due = [request for at, request in self._waiting if at <= self._num_steps]
        self._waiting = [(at, each) for at, each in self._waiting if at > self._num_steps]
        return events + [arrival(request) for request in due]

    def close(self) -> Trace:
        return self.world.close()


def serve_on_rank(rank: int, world_size: int) -> tuple[list, dict[int, list[int]], int]:
    from phalanx.worlds.dist import DistWorld

    engine, requests = small_engine(), requests_of_tensors()
    tokens: dict[int, list[int]] = {}
    for each in requests:  # every rank holds the text; the leader alone decides when it is computed
        engine.add(each)

    def step(context: Any, action: Compute) -> dict[str, Any]:
        result = engine.step(BatchPlan(*action.batch))
        for each in result.outputs:
            tokens.setdefault(each.request, []).append(each.token)
        ended = [each.request for each in result.outputs if each.reason]
        accepted = list(result.accepted)
        return {"requests": list(result.requests), "accepted": accepted, "ended": ended}

    mesh = Mesh(tp=world_size)
    world = DistWorld(mesh, {"engine.step": step}, rank, current_store(), timeout_s=30.0)
    world.facts = engine.facts
    trace = drive(RecordingWorld(ServedRanks(world, requests)), reacts=[POLICY])
    return decisions(trace), tokens, engine.kv.num_free


@pytest.mark.dist
def test_two_processes_carry_out_the_leaders_plans():
    requests = requests_of_tensors()
    want = {r.id: alone(r.tokens, r.sampling) for r in requests}
    for log, tokens, num_free in run_ranks(serve_on_rank, 2):
        assert log == expected()
        assert tokens == want
        assert num_free == 3
