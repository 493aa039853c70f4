"""Laws of the plain engine: whole prompts first, nobody preempted, everything set aside."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.action import Action
from phalanx.cost.serving import EngineCost
from phalanx.drive import drive
from phalanx.errors import JobError, PlanError
from phalanx.mesh import Mesh
from phalanx.policies.serve import BatchPlan
from phalanx.policies.serve.prefill_first import PrefillFirst
from phalanx.policy import Event, View
from phalanx.registry import build
from phalanx.worlds.sim import SimWorld
from phalanx.worlds.sim_serving import SimEngine, SimRequest

COST = EngineCost(lambda plan: 1.0 + plan.num_tokens)


class Logged(PrefillFirst):
    """Keeps its plans."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)
        object.__setattr__(self, "plans", [])

    def on(self, state, events, view) -> list[Action]:
        actions = super().on(state, events, view)
        self.plans.extend(action.batch for action in actions)
        return actions


def simulate(requests: list[SimRequest], policy: Logged, **limits: int) -> SimEngine:
    engine = SimEngine(requests, **limits)
    world = SimWorld(Mesh(engine=1), COST, facts=engine.facts, outcomes=engine.outcomes)
    world.post(*engine.arrivals())
    drive(world, reacts=[policy])
    return engine


def asks(
    id_: int, prompt_len: int, max_new: int, arrive_s: float = 0.0, new: int = 0
) -> SimRequest:
    return SimRequest(
        id=id_, arrive_s=arrive_s, prompt_len=prompt_len, max_new=max_new, num_new=new or max_new
    )


def test_whole_prompts_one_a_step_before_anybody_decodes():
    policy = Logged()
    requests = [asks(0, 7, 4), asks(1, 13, 2), asks(2, 1, 3), asks(3, 5, 2, arrive_s=27.0)]
    engine = simulate(requests, policy, num_blocks=9, max_running=4, max_step_tokens=32)
    rows = [plan.rows() for plan in policy.plans]
    assert rows[:3] == [[(0, 7, 0)], [(1, 13, 0)], [(2, 1, 0)]]
    assert rows[3] == [(0, 1, 7), (1, 1, 13), (2, 1, 1)]  # 24 to 28 s
    assert rows[4] == [(3, 5, 0)]  # it came meanwhile: the others wait
    assert rows[5:] == [[(0, 1, 8), (2, 1, 2), (3, 1, 5)], [(0, 1, 9)]]
    assert engine.finish_s == {1: 28.0, 2: 38.0, 3: 38.0, 0: 40.0}


@pytest.mark.parametrize(("prompt_len", "sizes"), [(17, [16, 1]), (48, [16, 16, 16]), (3, [3])])
def test_a_prompt_beyond_a_step_takes_several_with_nothing_between(prompt_len, sizes):
    policy = Logged()
    requests = [asks(0, 2, 9), asks(1, prompt_len, 2), asks(2, 4, 2)]
    simulate(requests, policy, num_blocks=9, max_running=3, max_step_tokens=16)
    rows = [plan.rows() for plan in policy.plans]
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    assert rows[1 : 1 + len(sizes)] == [[(1, n, at)] for n, at in zip(sizes, starts)]
    assert rows[1 + len(sizes)] == [(2, 4, 0)]


def test_the_longest_output_is_set_aside_so_a_request_waits_though_blocks_are_free():
    policy = Logged()
    requests = [asks(0, 5, 27, new=3), asks(1, 16, 1), asks(2, 3, 1)]
    engine = simulate(requests, policy, num_blocks=3, max_running=3, max_step_tokens=32)
    first = {}
    for at, plan in enumerate(policy.plans):
        for request in plan.requests:
            first.setdefault(request, at)
    # 32 tokens of request 0 are two blocks; request 1 needs two, and request 2 does not overtake it
    assert first == {0: 0, 1: 3, 2: 4}
    assert engine.finish_s[0] == 10.0 and engine.num_preempted == 0


def test_cancelled_requests_leave_wherever_they_are():
    view = View(
        mesh=Mesh(engine=1),
        facts={"num_blocks": 9, "free_blocks": 9, "block_tokens": 16, "max_running": 2}
        | {"max_step_tokens": 8},
    )
    policy = PrefillFirst()
    state = policy.start(view)

    def tell(kind: str, item: int) -> list[Action]:
        data = {"prompt_len": 4, "max_new": 3, "adapter": item, "requests": [0], "accepted": [1]}
        return policy.on(state, [Event(kind=kind, time_s=0.0, item=item, data=data)], view)

    assert tell("arrive", 0)[0].batch.requests == [0]
    assert tell("arrive", 1) == tell("arrive", 2) == tell("cancel", 1) == tell("cancel", 0) == []
    plan: BatchPlan = tell("step", -1)[0].batch
    assert (plan.rows(), plan.adapter, plan.grammar) == ([(2, 4, 0)], [2], [-1])


def test_options_beyond_the_engine_and_requests_that_never_fit_are_refused():
    facts = {"num_blocks": 2, "block_tokens": 16, "max_running": 4, "max_step_tokens": 32}
    view = View(mesh=Mesh(engine=1), facts=facts)
    with pytest.raises(PlanError, match=r"max_running = 5: must lie in 1..4"):
        PrefillFirst(max_running=5).start(view)
    with pytest.raises(PlanError, match=r"max_step_tokens = 3: must lie in 4..32"):
        PrefillFirst(max_step_tokens=3).start(view)
    policy = build("serve", "prefill_first")
    data = {"prompt_len": 30, "max_new": 3}
    with pytest.raises(JobError, match=r"cache of 32 tokens"):
        policy.on(policy.start(view), [Event(kind="arrive", time_s=0, item=0, data=data)], view)


@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 50), st.integers(1, 14), st.integers(1, 14)),
        min_size=1,
        max_size=10,
    ),
    num_blocks=st.integers(4, 12),
    max_running=st.integers(1, 5),
    more_tokens=st.integers(0, 60),
)
@settings(max_examples=100, deadline=None)
def test_every_request_ends_each_token_is_computed_once_and_prompts_come_in_order(
    shapes, num_blocks, max_running, more_tokens
):
    requests = [
        asks(i, prompt, most, at, min(new, most))
        for i, (at, prompt, most, new) in enumerate(sorted(shapes))
    ]
    limits = {"max_running": max_running, "max_step_tokens": max_running + more_tokens}
    policy = Logged()
    engine = simulate(requests, policy, num_blocks=num_blocks, **limits)
    assert set(engine.finish_s) == {each.id for each in requests}
    assert engine.num_preempted == 0 and engine.facts["free_blocks"] == num_blocks
    computed = sum(plan.num_tokens for plan in policy.plans)
    assert computed == sum(each.prompt_len + each.num_new - 1 for each in requests)
    joined = [plan.requests[0] for plan in policy.plans if plan.kv_len[0] == 0]
    assert joined == sorted(joined)
