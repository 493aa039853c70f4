"""Real processes: same logs as the simulator, same bits as one process, failures named."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from phalanx.action import Action, Collective, Compute, Mark, Program, Recv, Send, Timer
from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.errors import PhalanxError
from phalanx.mesh import Mesh
from phalanx.policy import React
from phalanx.worlds.dist import DistWorld
from phalanx.worlds.local import LocalWorld
from phalanx.worlds.sim import SimWorld
from tests.ranks import DIED, current_store, run_ranks
from tests.worlds import programs

PROGRAMS = {
    "ring of 2": programs.ring(2),
    "ring of 3": programs.ring(3),
    "pipeline": programs.pipeline(),
    "reduce on 1": programs.reduce(1),
    "reduce on 2": programs.reduce(2),
}


def play(rank: int, world_size: int, name: str, num_steps: int):
    program = PROGRAMS[name]
    world = DistWorld(program.mesh, programs.OPS, rank, current_store(), timeout_s=40.0)
    trace = drive(world, program=program, num_steps=num_steps)
    return trace, world.tensors


@pytest.mark.dist
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_logs_and_results_are_those_of_the_other_worlds(name):
    program, num_steps = PROGRAMS[name], 2
    played = run_ranks(play, program.mesh.size, name, num_steps, backend=None)
    local = LocalWorld(program.mesh, programs.OPS)
    local_trace = drive(local, program=program, num_steps=num_steps)
    sim = SimWorld(program.mesh, TableCost({}, missing_s=1.0))
    sim_trace = drive(sim, program=program, num_steps=num_steps)
    for rank, (trace, tensors) in enumerate(played):
        assert trace.log(rank) == local_trace.log(rank) == sim_trace.log(rank)
        for column in ("step", "item", "axis", "peer", "payload_bytes", "wire_bytes"):
            simulated = sim_trace.where(rank=rank).column(column).tolist()
            assert trace.column(column).tolist() == simulated, column
            assert local_trace.where(rank=rank).column(column).tolist() == simulated, column
        expected = local.contexts[rank].tensors
        assert tensors.keys() == expected.keys()
        for handle, tensor in tensors.items():
            assert torch.equal(tensor.view(-1), expected[handle].view(-1)), handle


def exchange_twice(rank: int, world_size: int) -> dict[str, bool]:
    """Two exchanges in one lane beside computes of which the first outlasts the first exchange."""
    mesh, entries = Mesh(dp=world_size), {}

    def outlast(context, action) -> None:
        end_s = time.monotonic() + 40.0
        while not world._waiters._done.qsize():
            assert time.monotonic() < end_s, "the first exchange does not end"
            time.sleep(0.001)

    def look(context, action) -> None:
        for entry in world.pending[rank].kept:
            entries[entry.action.label] = entry.start is not None

    total = {"collective": "all_reduce", "axis": "dp", "tensor": "x", "lane": "axis:dp"}
    total |= {"payload_bytes": programs.MESSAGE_BYTES}
    actions = [
        Compute(op="fill", label="fill"),
        Collective(**total, label="one", after=("fill",)),
        Collective(**total, label="two"),
        Compute(op="outlast", label="outlast"),
        Compute(op="look", label="look"),
    ]
    ops = programs.OPS | {"outlast": outlast, "look": look}
    world = DistWorld(mesh, ops, rank, current_store(), timeout_s=40.0)
    drive(world, program=Program.alike(mesh, actions))
    return entries


@pytest.mark.dist
def test_an_exchange_starts_before_the_next_compute_once_the_one_before_it_has_ended():
    for started in run_ranks(exchange_twice, 2, backend=None):
        assert started["one"] and started["two"]


class StreamOrdered(DistWorld):
    """What NCCL needs: transfers end for the host at once, and the first dependant waits."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._is_stream_ordered = True


def play_stream_ordered(rank: int, world_size: int, name: str):
    program = PROGRAMS[name]
    world = StreamOrdered(program.mesh, programs.OPS, rank, current_store(), timeout_s=40.0)
    trace = drive(world, program=program, num_steps=2)
    return trace.log(rank), world.tensors


@pytest.mark.dist
@pytest.mark.parametrize("name", ["ring of 3", "pipeline", "reduce on 2"])
def test_transfers_that_only_a_stream_waits_for_give_the_same_results(name):
    program = PROGRAMS[name]
    local = LocalWorld(program.mesh, programs.OPS)
    trace = drive(local, program=program, num_steps=2)
    played = run_ranks(play_stream_ordered, program.mesh.size, name, backend=None)
    for rank, (log, tensors) in enumerate(played):
        assert log == trace.log(rank)
        for handle, tensor in local.contexts[rank].tensors.items():
            assert torch.equal(tensors[handle].view(-1), tensor.view(-1)), handle


def overlapping(rank: int, world_size: int) -> tuple[float, float, float]:
    mesh = Mesh(dp=2)
    ops = programs.OPS | {"sleep": lambda context, action: time.sleep(0.2)}
    ops["late"] = lambda context, action: time.sleep(0.1 * context.rank)
    actions = [
        Compute(op="fill", num_tokens=2),
        Compute(op="late", label="late"),
        Collective(collective="all_reduce", axis="dp", tensor="x", payload_bytes=56.0,
                   lane="axis:dp", label="sum", after=("late",)),
        Compute(op="sleep", label="work"),
        Compute(op="sleep", label="apply", after=("sum",)),
    ]  # fmt: skip
    world = DistWorld(mesh, ops, rank, current_store(), timeout_s=40.0)
    trace = drive(world, program=Program.alike(mesh, actions))
    start_s, dur_s = trace.column("start_s"), trace.column("dur_s")
    return float(start_s[2]), float(start_s[2] + dur_s[2]), float(start_s[3])


@pytest.mark.dist
def test_a_collective_runs_beside_compute():
    (sum_start_s, sum_end_s, work_start_s), _ = run_ranks(overlapping, 2, backend=None)
    assert sum_start_s <= work_start_s < sum_end_s  # rank 1 comes 0.1 s later, rank 0 works on


def crossing(rank: int, world_size: int) -> list[str]:
    """Each waits for its second message before it sends what the other waits for first."""
    mesh = Mesh(pp=2)
    message = {"axis": "pp", "payload_bytes": 28.0}
    first = [
        Compute(op="fill", label="fill"),
        Recv(**message, peer=1, tensor="late", lane="recv:a", label="late"),
        Recv(**message, peer=1, tensor="x:1", lane="recv:b", label="early"),
        Send(**message, peer=1, tensor="x:0", lane="send", after=("early",)),
    ]
    second = [
        Compute(op="fill", label="fill"),
        Send(**message, peer=0, tensor="x:1", lane="send:a", label="sent", after=("fill",)),
        Recv(**message, peer=0, tensor="x:0", lane="recv", label="got", after=("sent",)),
        Compute(op="name_late", label="named", after=("got",)),
        Send(**message, peer=0, tensor="late", lane="send:b", after=("named",)),
    ]

    def name_late(context, action) -> None:
        context.tensors["late"] = context.tensors["x:0"] + context.tensors["x:1"]

    program = Program.by_axis(mesh, "pp", [first, second])
    ops = programs.OPS | {"name_late": name_late}
    world = DistWorld(mesh, ops, rank, current_store(), timeout_s=40.0)
    drive(world, program=program)
    return torch.equal(world.tensors["late"], world.tensors["x:0"] + world.tensors["x:1"])


@pytest.mark.dist
def test_waiting_for_one_message_does_not_hold_up_another():
    assert run_ranks(crossing, 2, backend=None) == [True, True]


def caught_in(run) -> tuple[str, str, str, float]:
    start_s = time.monotonic()
    try:
        run()
    except PhalanxError as error:
        return error.code, error.where, str(error), time.monotonic() - start_s
    except ValueError as error:
        return "", "", str(error), 0.0
    return "", "", "", 0.0


def fail_on_two(rank: int, world_size: int, how: str):
    mesh, store = Mesh(dp=3), current_store()

    def strike(context, action) -> None:
        store.add("first sum seen", 1)
        if context.rank != 2:
            return
        if how == "kill":
            until(store, "first sum seen", 3)
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise ValueError("no such luck")
        if how == "late":
            until(store, "given up", 2)
        if how == "size":
            context.tensors["x"] = context.tensors["x"][:-1].clone()

    actions = [
        Compute(op="fill"),
        Collective(collective="all_reduce", axis="dp", tensor="x", payload_bytes=28.0, label="one"),
        Compute(op="strike", after=("one",)),
        Collective(collective="all_reduce", axis="dp", tensor="x", payload_bytes=28.0, label="two"),
    ]
    ops = programs.OPS | {"strike": strike}
    timeout_s = 4.0 if how == "late" else 50.0  # the others must not need it
    world = DistWorld(mesh, ops, rank, store, timeout_s=timeout_s)
    caught = caught_in(lambda: drive(world, program=Program.alike(mesh, actions)))
    store.add("given up", 1)
    return caught


def until(store, name: str, count: int) -> None:
    while store.add(name, 0) < count:
        time.sleep(0.01)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("kill", "world/dead", "rank 2 last took part in all_reduce one"),
        ("raise", "world/failed", "raised ValueError: no such luck"),
        ("late", "world/timeout", "did not come to all_reduce two"),
        ("size", "world/size", "x differs from the plan"),
    ],
)
def test_others_stop_in_time_and_name_the_rank(how, code, words):
    answers = run_ranks(fail_on_two, 3, how, backend=None, may_die=(2,) if how == "kill" else ())
    for rank in (0, 1):
        its_code, where, text, took_s = answers[rank]
        assert its_code == code and where.startswith("rank 2") and words in text, text
        assert took_s < 40.0
    if how == "kill":
        assert answers[2] == DIED


def absent(rank: int, world_size: int):
    if rank == 1:
        time.sleep(2.0)
        return None
    run = lambda: DistWorld(Mesh(dp=2), {}, rank, current_store(), timeout_s=0.5)  # noqa: E731
    return caught_in(run)


@pytest.mark.dist
def test_ranks_that_never_start_are_named():
    code, where, text, _ = run_ranks(absent, 2, backend=None)[0]
    assert code == "world/timeout" and where == "ranks [1]" and "did not start" in text


class OuterSum(React):
    """Each step: an exchange that overlaps the next step, applied one step later."""

    def start(self, view):
        return []

    def on(self, state, events, view) -> list[Action]:
        actions: list[Action] = []
        for event in events:
            state.append((event.kind, event.rank, event.item, dict(event.data)))
            if event.kind == "step":
                actions += self._after_step(event.item)
            elif event.kind == "done" and event.label.startswith("apply") and event.rank == 1:
                actions.append(Timer(delay_s=0.01, label=f"timer{event.item}", item=event.item))
            elif event.kind == "timer" and event.rank == 0:
                actions.append(Mark(name="commit", value=float(event.item)))
        self.seen = state
        return actions

    def _after_step(self, step: int) -> list[Action]:
        exchange = Collective(
            collective="all_reduce", axis="dp", lane="axis:dp", tensor="x", payload_bytes=56.0,
            label=f"exchange{step}", members=(0, 1), epoch=3,
        )  # fmt: skip
        actions: list[Action] = [exchange]
        if step > 1:
            after = (f"exchange{step - 1}",)
            actions.append(Compute(op="apply", label=f"apply{step}", item=step, after=after))
        return actions


def decided(rank: int, world_size: int, num_steps: int):
    mesh, policy = Mesh(dp=2), OuterSum()
    ops = {
        "fill": programs.fill,
        "apply": lambda context, action: {"sum": float(context.tensors["x"].sum())},
    }
    program = Program.alike(mesh, [Compute(op="fill", num_tokens=2)])
    world = DistWorld(mesh, ops, rank, current_store(), timeout_s=40.0)
    trace = drive(world, program=program, num_steps=num_steps, reacts=[policy])
    return trace.log(rank), getattr(policy, "seen", None), world.view("job").step


@pytest.mark.dist
def test_the_leader_decides_and_the_others_follow():
    (log, seen, step), (other_log, other_seen, _) = run_ranks(decided, 2, 3, backend=None)
    assert other_seen is None  # only the leader asks the policy
    assert log == other_log
    assert [item for kind, _, item, _ in seen if kind == "step"] == [1, 2, 3]
    applied = [(rank, data) for kind, rank, item, data in seen if kind == "done" and data]
    assert {rank for rank, _ in applied} == {0, 1}
    assert step == 3
    mesh, policy = Mesh(dp=2), OuterSum()
    ops = {"fill": programs.fill,
           "apply": lambda context, action: {"sum": float(context.tensors["x"].sum())}}  # fmt: skip
    local = LocalWorld(mesh, ops)
    program = Program.alike(mesh, [Compute(op="fill", num_tokens=2)])
    trace = drive(local, program=program, num_steps=3, reacts=[policy])
    assert trace.log(1) == other_log


def keys_left(rank: int, world_size: int, num_steps: int) -> int:
    decided(rank, world_size, num_steps)
    store = current_store()
    store.add("ended", 1)
    while store.add("ended", 0) < world_size:
        time.sleep(0.01)
    return store.num_keys()


@pytest.mark.dist
def test_rounds_leave_no_trail_of_keys():
    few, many = (run_ranks(keys_left, 2, steps, backend=None)[0] for steps in (3, 9))
    assert many == few
