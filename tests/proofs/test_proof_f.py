"""Proof f: a membership of three loses a member by kill -9, goes on, and takes it back.

The same fault script drives the simulator and three real processes; both must decide the same
epochs, members and contributors.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from phalanx.action import Action, Compute
from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.engines.islands import IslandWorld
from phalanx.engines.replica import Replica
from phalanx.membership import Timeouts
from phalanx.mesh import Mesh
from phalanx.policies.recover.rejoin import Rejoin
from phalanx.trace import Trace
from phalanx.worlds.action_json import actions_from_json
from phalanx.worlds.faults import Fault, FaultScript
from phalanx.worlds.membership_store import MembershipStore
from phalanx.worlds.sim import SimWorld
from phalanx.worlds.torch_tensors import RankContext
from tests.ranks import current_store, run_ranks

NUM_REPLICAS, KILL_AFTER, RESTART_AFTER, MORE_STEPS = 3, 4, 6, 4
BASE_LR, STEP_S = 1e-2, 0.3
TIMEOUTS = Timeouts(
    heartbeat_s=0.1, detect_s=1.0, exchange_s=15.0, island_s=16.0, init_s=20.0, quorum_s=40.0
)


def script_of(victim: int) -> FaultScript:
    kill = Fault(kind="kill", ranks=(victim,), at_step=KILL_AFTER)
    restart = Fault(kind="restart", ranks=(victim,), at_step=RESTART_AFTER)
    return FaultScript((kill, restart), detect_s=TIMEOUTS.detect_s)


def formations(actions: Sequence[Action]) -> list[tuple[int, tuple, tuple]]:
    """(epoch, members, contributors) of each epoch that was decided."""
    batches = [a.batch for a in actions if a.operator == "membership.form"]
    return [
        (b["epoch"], b["members"], tuple(m for m in b["members"] if m not in b["behind"]))
        for b in batches
    ]


def commits(actions: Sequence[Action]) -> list[tuple[int, tuple, float]]:
    """(step, contributors, learning-rate factor) of each step that was committed."""
    updates = [a for a in actions if a.operator == "update"]
    return [(a.item, a.batch["contributors"], a.batch["lr_factor"]) for a in updates]


# ---- in the simulator ------------------------------------------------------------------------


class KeepingWorld(SimWorld):
    """Keeps what was decided."""

    def agree(self, scope, decide):
        decided = super().agree(scope, decide)
        self.decided = [*getattr(self, "decided", []), *decided]
        return decided


def simulate(victim: int, num_steps: int = 12) -> tuple[list[Action], Trace]:
    seconds = {"membership.form": 1, "grad": 4, "grad.zero": 0, "all_reduce": 2, "vote": 0}
    seconds |= {"update": 1, "state.load": 1, "move": 1, "send": 3}
    facts = {"grad_bytes": 12, "state_bytes": 36, "num_steps": num_steps}
    world = KeepingWorld(
        Mesh(replica=NUM_REPLICAS), TableCost(seconds), faults=script_of(victim), facts=facts
    )
    trace = drive(world, reacts=[Rejoin()])
    return world.decided, trace


def test_history_of_a_loss_and_a_return():
    """grad 4 s, all-reduce 2 s, update 1 s, forming 1 s; detection 1 s, copy 1 s, transfer 3 s.

    Step 5 begins at 28 and rank 1 dies at once. The others hear of it at 29 while they compute, do
    step 5 again from 32 on and end it at 39: 4 s late. Rank 1 is back at 46, when 6 steps are done,
    and joins step 8 at 53: copy until 54, transfer until 57, while the others compute.
    """
    decided, trace = simulate(victim=1)
    assert formations(decided) == [
        (1, (0, 1, 2), (0, 1, 2)),
        (2, (0, 2), (0, 2)),
        (3, (0, 1, 2), (0, 2)),
    ]
    numbers = [(step, len(contributors)) for step, contributors, _ in commits(decided)]
    assert numbers == [
        *((step, 3) for step in range(1, 5)),
        *((step, 2) for step in range(5, 9)),
        *((step, 3) for step in range(9, 13)),
    ]
    ends_s = {}
    for row in trace.where(operator="update").rows():
        ends_s.setdefault(row["rank"], []).append(row["start_s"] + row["dur_s"])
    survivors = [7, 14, 21, 28, 39, 46, 53, 60]
    assert ends_s[0][:8] == survivors == ends_s[2][:8]
    assert ends_s[1][:5] == [7, 14, 21, 28, 61], "it loads the state while the others update"
    moved = [row for row in trace.rows() if row["operator"] in ("move", "send")]
    assert [(row["rank"], row["start_s"], row["payload_bytes"]) for row in moved] == [
        (0, 53, 36),
        (0, 54, 36),
    ]


# ---- on real processes -----------------------------------------------------------------------


def make_model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def loss_of(model: torch.nn.Module, member: int, step: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(1000 * member + step)
    x_BD, y_BC = torch.randn(11, 5, generator=source), torch.randn(11, 3, generator=source)
    return mse_loss(model(x_BD), y_BC)


def train(rank: int, world_size: int, victim: int) -> dict[str, Any]:
    """One replica; the victim's first process dies inside it."""
    model = make_model()
    script, digests, commit_s = script_of(victim), {}, {}

    def compute_grad(step: int) -> None:
        due = script.due(0.0, step - 1, rank)
        if membership.me.incarnation == 1 and any(fault.kind == "kill" for fault in due):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(STEP_S)
        loss_of(model, rank, step).backward()

    def update(context: RankContext, action: Compute) -> None:
        replica.ops["update"](context, action)
        digests[action.item], commit_s[action.item] = replica.digest(), time.monotonic()
        together = len(action.batch["contributors"]) == world_size
        if together and action.item > KILL_AFTER and facts["num_steps"] == 10**6:
            facts["num_steps"] = action.item + MORE_STEPS

    optimizer = torch.optim.AdamW(model.parameters(), lr=BASE_LR)
    replica = Replica(dict(model.named_parameters()), optimizer, compute_grad)
    facts = replica.facts | {"num_steps": 10**6}
    mesh = Mesh(replica=world_size)
    membership = MembershipStore(current_store(), rank, range(world_size), TIMEOUTS)
    world = IslandWorld(
        mesh,
        membership,
        current_store(),
        ops=replica.ops | {"update": update},
        facts=facts,
        context=replica.context(rank, mesh),
    )
    if membership.me.incarnation > 1:  # the script says when the victim may come back
        while membership.roster.furthest_step < RESTART_AFTER:
            membership.poll()
            time.sleep(0.01)
    with world:
        trace = drive(world, reacts=[Rejoin()])
    log = [membership.decision(seq) for seq in range(membership.num_decisions())]
    return {
        "decided": [a for entry in log for a in actions_from_json(entry.get("actions", ()))],
        "digests": digests,
        "commit_s": commit_s,
        "executed": trace.log(rank, ["membership.form", "grad", "grad.zero", "update"]),
        "params": [p.detach() for p in model.parameters()],
    }


def replay(contributors_of_step: list[tuple[int, tuple, float]]) -> list[torch.Tensor]:
    """The reference: one process with the recorded contributors, plain torch."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=BASE_LR)
    for step, contributors, factor in contributors_of_step:
        optimizer.zero_grad()
        losses = [loss_of(model, member, step) for member in contributors]
        (sum(losses) / len(losses)).backward()
        optimizer.param_groups[0]["lr"] = BASE_LR * factor
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.dist
@pytest.mark.parametrize("victim", [1, 0], ids=["a-follower", "the-leader"])
def test_three_replicas_lose_one_by_kill_and_take_it_back(victim):
    results = run_ranks(train, NUM_REPLICAS, victim, backend=None, may_die=(victim,), respawn=True)
    survivors = [results[r] for r in range(NUM_REPLICAS) if r != victim]
    back = results[victim]
    decided = back["decided"]
    committed = commits(decided)

    simulated, _ = simulate(victim)
    assert formations(decided) == formations(simulated)
    assert [epoch for epoch, *_ in formations(decided)] == [1, 2, 3]
    assert [c for _, c, _ in committed[:KILL_AFTER]] == [(0, 1, 2)] * KILL_AFTER

    num_steps = committed[-1][0]
    assert [step for step, *_ in committed] == list(range(1, num_steps + 1)), "no step is lost"
    for survivor in survivors:
        assert sorted(survivor["digests"]) == list(range(1, num_steps + 1))
        assert survivor["digests"] == survivors[0]["digests"]
    rejoined = min(back["digests"])
    assert RESTART_AFTER < rejoined <= num_steps - MORE_STEPS
    assert back["digests"] == {
        step: digest for step, digest in survivors[0]["digests"].items() if step >= rejoined
    }, "bit-exact from the first step that it commits"

    for survivor in survivors:
        times_s = [survivor["commit_s"][step] for step in range(1, num_steps + 1)]
        steps_s = [after - before for before, after in pairwise(times_s)]
        normal_s = median(steps_s[: KILL_AFTER - 1])
        assert steps_s[KILL_AFTER - 1] <= TIMEOUTS.detect_s + 2 * normal_s

    expected = replay(committed)
    for result in results:
        for ours, theirs in zip(result["params"], expected):
            assert (ours - theirs).abs().max() <= 1e-6
