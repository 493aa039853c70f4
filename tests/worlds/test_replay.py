"""Recordings: durations under a program, events under policies."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from phalanx.action import Action, Collective, Compute, Program, Recv, Send, Timer
from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.errors import WorldError
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.policies.sync.streaming import Streaming
from phalanx.policy import React
from phalanx.registry import build
from phalanx.trace import Trace, TraceBuilder
from phalanx.workload import toy_work
from phalanx.worlds.replay import EventReplay, RecordingWorld, ReplayWorld
from phalanx.worlds.sim import SimWorld

# ---- durations ---------------------------------------------------------------------------------


def test_replaying_a_simulation_gives_its_trace():
    mesh = Mesh(pp=2, shard=2)
    program = lower(
        toy_work(4, [3, 5, 2]), mesh, build("pipeline", "1f1b"), [build("data", "fsdp")]
    )
    seconds = {"mlp.F": 2, "mlp.B": 5, "all_gather": 3, "reduce_scatter": 4, "send": 1}
    trace = drive(SimWorld(mesh, TableCost(seconds, missing_s=1.0)), program=program)
    replayed = drive(ReplayWorld(mesh, trace), program=program)
    assert list(replayed.rows()) == list(trace.rows())


def measured(*rows: tuple[int, str, str, float]) -> Trace:
    builder = TraceBuilder("measured")
    for rank, action_id, operator, dur_s in rows:
        builder.add(rank=rank, action_id=action_id, operator=operator, dur_s=dur_s)
    return builder.build()


def test_waiting_in_a_measured_collective_is_not_replayed():
    """Rank 0 came early and measured 9 s, rank 1 came last and measured the 2 s of the transfer."""
    mesh = Mesh(dp=2)
    trace = measured(
        *((0, "w", "work", 1.0), (1, "w", "work", 8.0)),
        *((0, "s", "all_reduce", 9.0), (1, "s", "all_reduce", 2.0)),
    )
    program = Program.alike(
        mesh,
        [
            Compute(op="work", label="w"),
            Collective(collective="all_reduce", axis="dp", label="s", lane="compute"),
        ],
    )
    replayed = drive(ReplayWorld(mesh, trace), program=program)
    assert replayed.end_s == 10.0
    assert replayed.where(operator="all_reduce").columns["start_s"].tolist() == [8.0, 8.0]


def test_waiting_in_a_measured_message_is_not_replayed():
    mesh = Mesh(pp=2)
    trace = measured((0, "w", "work", 4.0), (0, "s", "send", 1.0), (1, "r", "recv", 5.0))
    send = Send(axis="pp", peer=1, tensor="x", label="s", lane="compute")
    recv = Recv(axis="pp", peer=0, tensor="x", label="r")
    program = Program.by_axis(mesh, "pp", [[Compute(op="work", label="w"), send], [recv]])
    assert drive(ReplayWorld(mesh, trace), program=program).end_s == 5.0


def test_labels_then_rank_then_all_ranks_give_the_price():
    mesh = Mesh(dp=3)
    trace = measured(
        *((0, "x", "op", 1.0), (0, "y", "op", 3.0), (0, "x", "op", 2.0)),
        *((1, "x", "op", 10.0), (1, "", "op", 20.0)),
    )
    program = Program.alike(mesh, [Compute(op="op", label="x"), Compute(op="op")])
    replayed = drive(ReplayWorld(mesh, trace), program=program)
    assert replayed.columns["dur_s"].tolist() == [1.5, 2.0, 10.0, 15.0, 7.2, 7.2]


def test_an_operator_that_was_not_recorded_is_named():
    mesh = Mesh(dp=1)
    with pytest.raises(WorldError) as caught:
        world = ReplayWorld(mesh, measured((0, "x", "matmul", 1.0)))
        drive(world, program=Program.alike(mesh, [Compute(op="matmull")]))
    assert caught.value.code == "world/unbound" and caught.value.legal == ("matmul",)


# ---- events ------------------------------------------------------------------------------------

MESH = Mesh(island=3)
STEP = Program.alike(MESH, [Compute(op="inner")])
POLICY = Streaming(inner_steps=4, num_fragments=2, overlap_steps=1, blend=0.5)


def record(policy: React, num_steps: int = 9) -> Trace:
    cost = TableCost({"inner": 2.0, "all_reduce": 1.0}, missing_s=0.0)
    world = SimWorld(MESH, cost, facts={"fragment_bytes": [8.0, 16.0]})
    return drive(RecordingWorld(world), program=STEP, num_steps=num_steps, reacts=[policy])


def test_a_policy_decides_the_same_when_it_hears_the_same(tmp_path):
    trace = record(POLICY)
    assert len(trace.where(operator="all_reduce")) > 0
    replayed = drive(EventReplay(MESH, trace), program=STEP, num_steps=9, reacts=[POLICY])
    assert replayed is trace
    trace.save(tmp_path / "trace.npz")
    drive(EventReplay(MESH, Trace.load(tmp_path / "trace.npz")), reacts=[POLICY])


def test_another_policy_is_found_out_at_its_first_other_decision():
    trace = record(POLICY)
    other = Streaming(inner_steps=4, num_fragments=2, overlap_steps=1, blend=0.25)
    with pytest.raises(WorldError) as caught:
        drive(EventReplay(MESH, trace), reacts=[other])
    error = caught.value
    assert error.code == "world/failed" and "step" in error.where
    assert "0.5" in error.detail and "0.25" in error.detail


def test_a_decision_that_is_left_out_is_found():
    @dataclass(frozen=True, kw_only=True)
    class Tired(Streaming):
        def on(self, state, events, view):
            actions = super().on(state, events, view)
            return actions if state.step < 8 else actions[:-1]

    options = {"inner_steps": 4, "num_fragments": 2, "overlap_steps": 1, "blend": 0.5}
    with pytest.raises(WorldError) as caught:
        drive(EventReplay(MESH, record(POLICY)), reacts=[Tired(**options)])
    assert "now:      nothing" in caught.value.detail


class Secretive(React):
    """Looks at something that is neither an event nor in its view."""

    calls = 0

    def start(self, view):
        return None

    def on(self, state, events, view) -> list[Action]:
        type(self).calls += 1
        return [Timer(delay_s=float(self.calls), ranks=(0,))] if events[0].kind == "start" else []


def test_hidden_state_is_found_out():
    trace = record(Secretive(), num_steps=1)
    with pytest.raises(WorldError):
        drive(EventReplay(MESH, trace), reacts=[Secretive()])


def test_a_trace_without_a_recording_is_refused():
    with pytest.raises(WorldError) as caught:
        EventReplay(MESH, measured())
    assert caught.value.code == "world/unbound"
