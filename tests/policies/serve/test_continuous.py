"""Laws of continuous batching, in the simulator and without a world."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.action import Action, Compute
from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.errors import JobError, PlanError
from phalanx.mesh import Mesh
from phalanx.policies.serve import BatchPlan
from phalanx.policies.serve.continuous import Continuous
from phalanx.policy import Event, View
from phalanx.registry import build
from phalanx.worlds.sim import SimWorld
from phalanx.worlds.sim_serving import SimEngine, SimRequest


class PerToken(TableCost):
    """One second a step and one per token."""

    def compute_s(self, action: Compute, rank: int) -> float:
        return 1.0 + action.num_tokens


class Logged(Continuous):
    """Keeps its plans."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)
        object.__setattr__(self, "plans", [])

    def on(self, state, events, view) -> list[Action]:
        actions = super().on(state, events, view)
        self.plans.extend(action.batch for action in actions)
        return actions


def simulate(engine: SimEngine, policy: Continuous) -> None:
    world = SimWorld(Mesh(engine=1), PerToken({}), facts=engine.facts, outcomes=engine.outcomes)
    world.post(*engine.arrivals())
    drive(world, reacts=[policy])


def lone(prompt_len: int, num_new: int, id_: int = 0, arrive_s: float = 0.0) -> SimRequest:
    return SimRequest(
        id=id_, arrive_s=arrive_s, prompt_len=prompt_len, max_new=num_new, num_new=num_new
    )


def view_of(**facts: int) -> View:
    limits = {"num_blocks": 100, "block_tokens": 16, "max_running": 4, "max_step_tokens": 32}
    return View(mesh=Mesh(engine=1), facts={"free_blocks": 100} | limits | facts)


def arrive(id_: int, prompt_len: int = 5, max_new: int = 5) -> Event:
    data = {"prompt_len": prompt_len, "max_new": max_new}
    return Event(kind="arrive", time_s=0.0, item=id_, data=data)


def step_of(actions: list[Action]) -> Event:
    plan: BatchPlan = actions[0].batch
    whole = [1] * len(plan.requests)
    return Event(kind="step", time_s=0.0, data={"requests": plan.requests, "accepted": whole})


@pytest.mark.parametrize(("prompt_len", "num_new"), [(1, 1), (7, 3), (8, 1), (33, 5)])
def test_steps_of_a_lone_request(prompt_len, num_new):
    engine = SimEngine([lone(prompt_len, num_new)], num_blocks=5, max_running=3, max_step_tokens=16)
    policy = Logged(chunk=8)
    simulate(engine, policy)
    num_steps = -(-prompt_len // 8) + num_new - 1
    assert len(policy.plans) == num_steps
    assert engine.finish_s == {0: num_steps + prompt_len + num_new - 1}


def test_decoding_goes_on_while_a_long_prompt_is_computed():
    requests = [lone(4, 20), lone(60, 2, 1, arrive_s=1.0)]
    engine = SimEngine(requests, num_blocks=8, max_running=2, max_step_tokens=9)
    policy = Logged()
    simulate(engine, policy)
    with_prompt = [plan for plan in policy.plans if plan.requests == [0, 1]]
    assert [plan.query_len for plan in with_prompt[:8]] == [[1, 8]] * 7 + [[1, 4]]


def test_nobody_overtakes_the_head_of_the_queue():
    requests = [lone(40, 8), lone(40, 1, 1), lone(2, 1, 2)]
    engine = SimEngine(requests, num_blocks=4, max_running=3, max_step_tokens=64)
    policy = Logged()
    simulate(engine, policy)
    first = {id_: i for i, plan in reversed(list(enumerate(policy.plans))) for id_ in plan.requests}
    assert first[0] < first[1] <= first[2]
    assert engine.finish_s[0] < engine.finish_s[1]


def test_the_youngest_is_preempted_and_comes_back_before_those_who_wait():
    requests = [lone(30, 20), lone(30, 20, 1), lone(3, 2, 2, arrive_s=40.0)]
    engine = SimEngine(requests, num_blocks=5, max_running=2, max_step_tokens=64)
    policy = Logged()
    simulate(engine, policy)
    assert [plan.preempted for plan in policy.plans if plan.preempted] == [[1]]
    assert engine.finish_s[0] < engine.finish_s[1]
    back = next(i for i, plan in enumerate(policy.plans) if plan.preempted) + 1
    again = next(plan for plan in policy.plans[back:] if 1 in plan.requests)
    row = again.rows()[again.requests.index(1)]
    assert row[1] > 30 and row[2] == 0  # the prompt and its output so far, from the start
    first_of_2 = next(i for i, plan in enumerate(policy.plans) if 2 in plan.requests)
    assert policy.plans.index(again) <= first_of_2


def test_no_second_step_while_one_is_under_way():
    policy, view = Continuous(), view_of()
    state = policy.start(view)
    first = policy.on(state, [arrive(0)], view)
    assert len(first) == 1
    assert policy.on(state, [arrive(1)], view) == []
    second = policy.on(state, [step_of(first)], view)
    assert second[0].batch.requests == [0, 1]


def test_cancelled_requests_leave_wherever_they_are():
    policy, view = Continuous(max_running=2, max_step_tokens=32), view_of()
    state = policy.start(view)
    actions = policy.on(state, [arrive(i) for i in range(4)], view)
    assert actions[0].batch.requests == [0, 1]
    cancels = [Event(kind="cancel", time_s=0.0, item=i) for i in (0, 2)]
    assert policy.on(state, cancels, view) == []
    actions = policy.on(state, [step_of(actions)], view)
    assert actions[0].batch.requests == [1, 3]
    assert not state.gone


def test_adapter_and_grammar_slots_follow_their_request():
    policy, view = Continuous(), view_of()
    state = policy.start(view)
    slotted = replace(arrive(5), data={**arrive(5).data, "adapter": 3, "grammar": 8})
    plan = policy.on(state, [arrive(4), slotted], view)[0].batch
    assert (plan.adapter, plan.grammar, plan.num_draft) == ([-1, 3], [-1, 8], [0, 0])


def test_a_request_that_can_never_fit_is_refused():
    policy, view = Continuous(), view_of(num_blocks=2)
    with pytest.raises(JobError, match=r"cache of 32 tokens; nearest legal values: 32"):
        policy.on(policy.start(view), [arrive(0, prompt_len=30, max_new=3)], view)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_running": 5}, r"max_running = 5: must lie in 1..4"),
        ({"max_step_tokens": 3}, r"max_step_tokens = 3: must lie in 4..32"),
        ({"chunk": 33}, r"chunk = 33: must lie in 1..32"),
        ({"max_running": -1}, r"nearest legal values: 1"),
    ],
)
def test_options_beyond_the_engine_are_refused(options, words):
    with pytest.raises(PlanError, match=words):
        Continuous(**options).start(view_of())


def test_the_registry_builds_it_from_a_table():
    assert build("serve", {"name": "continuous", "chunk": 7}) == Continuous(chunk=7)
    with pytest.raises(JobError, match="nearest legal values: chunk"):
        build("serve", {"name": "continuous", "chunks": 7})


def test_an_engine_refuses_plans_beyond_its_limits():
    columns = {name: (0, 0) for name in ("num_draft", "adapter", "grammar")}
    plan = BatchPlan(requests=(1, 2), query_len=(3, 4), kv_len=(0, 0), **columns)
    plan.require_legal(2, 7)
    with pytest.raises(PlanError, match="rows = 2"):
        plan.require_legal(1, 7)
    with pytest.raises(PlanError, match="tokens = 7"):
        plan.require_legal(2, 6)
    with pytest.raises(PlanError, match="stands twice"):
        plan._replace(requests=(1, 1)).require_legal(2, 7)
    with pytest.raises(PlanError, match="at least one token"):
        plan._replace(query_len=(3, 0)).require_legal(2, 7)


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 40),  # arrival
        st.integers(1, 50),  # prompt
        st.integers(1, 14),  # longest output
        st.integers(1, 14),  # output
    ),
    min_size=1,
    max_size=12,
)


@given(
    shapes=REQUESTS,
    num_blocks=st.integers(4, 12),
    max_running=st.integers(1, 5),
    more_tokens=st.integers(0, 30),
    chunk=st.integers(0, 5),
)
@settings(max_examples=80, deadline=None)
def test_every_request_ends_and_nothing_leaks(shapes, num_blocks, max_running, more_tokens, chunk):
    # SimEngine refuses plans over the budget, without room, or with a wrong cache length
    requests = [
        SimRequest(id=i, arrive_s=at, prompt_len=prompt, max_new=most, num_new=min(new, most))
        for i, (at, prompt, most, new) in enumerate(shapes)
    ]
    limits = {"max_running": max_running, "max_step_tokens": max_running + more_tokens}
    engine = SimEngine(requests, num_blocks=num_blocks, **limits)
    policy = Logged(chunk=min(chunk, limits["max_step_tokens"]))
    simulate(engine, policy)
    assert set(engine.finish_s) == {each.id for each in requests}
    assert engine.facts["free_blocks"] == num_blocks
    computed = sum(plan.num_tokens for plan in policy.plans)
    needed = sum(each.prompt_len + each.num_new - 1 for each in requests)
    assert computed >= needed and (computed == needed or engine.num_preempted)
