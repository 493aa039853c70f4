"""Reactive policies on real executors: told the same story, they decide what they decide in virtual
time, and every rank carries out what it carries out there."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from phalanx.action import Action, Compute
from phalanx.drive import drive
from phalanx.engines.council import Council
from phalanx.engines.islands import IslandWorld
from phalanx.engines.replica import Replica
from phalanx.membership import Timeouts
from phalanx.mesh import Mesh
from phalanx.policies.serve import ENGINE_STEP, BatchPlan
from phalanx.policy import Event, React, View
from phalanx.registry import Entry
from phalanx.trace import Trace
from phalanx.worlds.dist import DistWorld
from phalanx.worlds.local import LocalWorld
from phalanx.worlds.membership_store import MembershipStore
from phalanx.worlds.replay import RecordingWorld
from tests.contract import scenarios
from tests.contract.planned_inputs import AnyOp, PlannedInputs
from tests.contract.scenarios import (
    NUM_BLOCKS,
    SYNC_STEPS,
    Arrivals,
    decided,
    heard,
    make,
    mesh_of,
    name_of,
    of_shape,
    simulate,
    sync_facts,
)
from tests.ranks import current_store, run_ranks


def of_family(family: str) -> Any:
    entries = [entry for entry in of_shape("react") if entry.family == family]
    return pytest.mark.parametrize("entry", entries, ids=name_of)


# ---- sync: islands in one process, and on two --------------------------------------------------


def sync(world: Any, policy: React) -> Trace:
    PlannedInputs(world)
    program = scenarios.inner_steps(policy)
    return drive(RecordingWorld(world), program=program, num_steps=SYNC_STEPS, reacts=[policy])


def sync_on_rank(rank: int, world_size: int, policy: React) -> Trace:
    mesh, store = mesh_of(policy), current_store()
    world = DistWorld(mesh, AnyOp(), rank, store, timeout_s=20.0, facts=sync_facts())
    return sync(world, policy)


@of_family("sync")
def test_islands_in_one_process_are_told_what_is_simulated(entry: Entry):
    policy, simulated = make(entry), simulate(entry, "steady")
    local = sync(LocalWorld(mesh_of(policy), AnyOp(), facts=sync_facts()), policy)
    assert decided(local) == decided(simulated)
    assert [local.log(rank) for rank in (0, 1)] == [simulated.log(rank) for rank in (0, 1)]


@pytest.mark.dist
@of_family("sync")
def test_two_islands_are_told_what_is_simulated(entry: Entry):
    simulated = simulate(entry, "steady")
    for rank, measured in enumerate(run_ranks(sync_on_rank, 2, make(entry), backend=None)):
        assert decided(measured) == decided(simulated)
        assert measured.log(rank) == simulated.log(rank)


# ---- serve: on two processes that count, and on an engine that computes -------------------------


def serve_on_rank(rank: int, world_size: int, policy: React) -> Trace:
    engine = scenarios.lengths_engine()

    def step(context: Any, action: Compute) -> dict[str, Any]:
        plan = BatchPlan(*action.batch)
        done = Event(kind="done", time_s=0.0, label=action.label)
        told, *finished = engine.outcomes[ENGINE_STEP](_with(action, plan), done)
        return {"step": dict(told.data), "ended": [event.item for event in finished]}

    world = DistWorld(Mesh(tp=2), {ENGINE_STEP: step}, rank, current_store(), timeout_s=20.0)
    world.facts = engine.facts  # live: the leader's policy reads how many blocks are free
    return drive(RecordingWorld(Arrivals(EngineSteps(world))), reacts=[policy])


def _with(action: Compute, plan: BatchPlan) -> Compute:
    return Compute(op=action.op, label=action.label, batch=plan)


class EngineSteps:
    """Tells policies of ended engine steps as engines do: once for all ranks."""

    def __init__(self, world: DistWorld) -> None:
        self.world, self.mesh, self.ranks = world, world.mesh, world.ranks
        self.view, self.load, self.issue = world.view, world.load, world.issue
        self.agree, self.close = world.agree, world.close

    def next_events(self) -> list[Event]:
        events = self.world.next_events()
        out = [event for event in events if event.kind == "start"]
        for event in events:
            if event.kind == "done" and event.rank == 0:
                at = event.time_s
                told = event.data["step"]
                out.append(Event(kind="step", time_s=at, label=event.label, data=told))
                out += [Event(kind="finish", time_s=at, item=i) for i in event.data["ended"]]
        return out


@pytest.mark.dist
@of_family("serve")
def test_two_ranks_of_an_engine_are_told_what_is_simulated(entry: Entry):
    simulated = simulate(entry, "three-requests")
    for rank, measured in enumerate(run_ranks(serve_on_rank, 2, make(entry), backend=None)):
        assert decided(measured) == decided(simulated)
        assert measured.log(rank) == simulated.log(0)


@of_family("serve")
def test_an_engine_that_computes_is_told_what_is_simulated(entry: Entry):
    from phalanx.engines.serve.settings import Request, Sampling
    from phalanx.engines.serve.world import EngineWorld
    from tests.engines.serve_cases import ScriptedInbox, make_engine, prompt_of

    script: dict[int, list[Any]] = {}
    for each in scenarios.ASKED:
        sampling = Sampling(max_new=each.max_new, ignore_eos=True)
        request = Request(each.id, prompt_of(each.prompt_len), each.prompt_len, sampling)
        script.setdefault(each.after_steps, []).append(request)
    tokens = 16 * NUM_BLOCKS
    engine = make_engine(**scenarios.SERVE_LIMITS, max_tokens=tokens, kv_tokens=tokens)
    world = RecordingWorld(EngineWorld(engine, ScriptedInbox(script)))
    measured = drive(world, reacts=[make(entry)])
    assert decided(measured) == decided(simulate(entry, "three-requests"))
    assert engine.kv.num_free == NUM_BLOCKS and not engine.requests


# ---- recover: real processes of which one is killed and started again ----------------------------

TIMEOUTS = Timeouts(  # a process on a busy machine may well be silent for a second
    heartbeat_s=0.1, detect_s=2.0, exchange_s=15.0, island_s=16.0, init_s=20.0, quorum_s=40.0
)


def make_replica(compute_grad: Callable[[int], None], model: torch.nn.Module) -> Replica:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Replica(dict(model.named_parameters()), sgd, compute_grad)


class Listening(React):
    """A policy, and what is done as soon as it has heard of a leave and of a join."""

    def __init__(self, inner: React, then: Mapping[str, Callable[[], None]]) -> None:
        self.inner, self.scope, self._then = inner, inner.scope, then

    def start(self, view: View) -> Any:
        return self.inner.start(view)

    def on(self, state: Any, events: Sequence[Event], view: View) -> list[Action]:
        actions = self.inner.on(state, events, view)
        for event in events:
            self._then.get(event.kind, lambda: None)()
        return actions


def recover_on_rank(rank: int, world_size: int, inner: React) -> Trace:
    """A replica. The script kills the second one, which comes back when its leave was heard of; the
    first then stays in its step until it has heard of the return, as in virtual time."""
    store, has_joined = current_store(), threading.Event()
    if store.add(f"starts/{rank}", 1) > 1:
        store.wait(["left"])
    then = {"leave": lambda: store.set("left", "yes"), "join": has_joined.set}
    model, policy = torch.nn.Linear(3, 2), Listening(inner, then)

    def compute_grad(step: int) -> None:
        due_here, due_there = (
            {fault.kind for fault in scenarios.LOSS_AND_RETURN.due(0.0, step - 1, each)}
            for each in (rank, 1)
        )
        if "kill" in due_here and membership.me.incarnation == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and "restart" in due_there:
            has_joined.wait()
        model(torch.ones(4, 3)).sum().backward()

    replica = make_replica(compute_grad, model)
    membership = MembershipStore(store, rank, range(world_size), TIMEOUTS)
    mesh = mesh_of(inner)
    facts = replica.facts | {"num_steps": scenarios.RECOVER_STEPS}
    context = replica.context(rank, mesh)
    world = IslandWorld(mesh, membership, store, ops=replica.ops, facts=facts, context=context)
    with world:
        return drive(RecordingWorld(world), reacts=[policy])


@pytest.mark.dist
@of_family("recover")
def test_real_replicas_hear_and_decide_what_is_simulated_under_one_fault_script(entry: Entry):
    policy = make(entry)
    facts = make_replica(lambda step: None, torch.nn.Linear(3, 2)).facts
    facts |= {"num_steps": scenarios.RECOVER_STEPS}
    world = RecordingWorld(scenarios.lossy_replicas(policy, facts))
    simulated = drive(world, reacts=[policy])
    arguments = {"backend": None, "may_die": (1,), "respawn": True}
    leader, back = run_ranks(recover_on_rank, 2, policy, **arguments)
    assert heard(leader, "leave", "join") == [("leave", 1), ("join", 1)]
    assert heard(simulated, "leave", "join") == [("leave", 1), ("join", 1)]
    assert decided(leader) == decided(simulated)
    assert decided(back) == decided(leader)[-len(decided(back)) :], "it follows from its return on"
    assert len(decided(back)) > 0


def test_a_leader_that_decides_before_its_first_heartbeat_was_read_is_alive():
    timeouts = Timeouts(heartbeat_s=1.0)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    follower, leader = (MembershipStore(store, place, (0, 1), timeouts) for place in (1, 0))
    try:
        follower.start()
        council = Council(follower, View(mesh=Mesh(replica=2)), lambda: True)
        time.sleep(0.3)  # heartbeats are not read more often than that
        assert council.events() is None
        leader.start()
        members = [leader.me, follower.me]
        leader.append(0, {"leader": leader.me, "actions": [], "membership": [1, members]})
        assert [event.kind for event in council.events()] == ["done"]
        assert council.events() is None, "there is nothing more to follow, and nobody has died"
    finally:
        follower.close()
        leader.close()
