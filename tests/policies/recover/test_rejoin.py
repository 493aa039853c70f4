"""Decisions of the rejoin policy, and the arithmetic of its source; no world."""

from __future__ import annotations

import pytest

from phalanx.action import Collective, Compute, Move, Recv, Send
from phalanx.errors import PlanError, WorldError
from phalanx.mesh import Mesh
from phalanx.policies.recover.rejoin import (
    Rejoin,
    effective_frac_rejoin,
    effective_frac_restart,
)
from phalanx.policy import Event, View

FACTS = {"grad_bytes": 12, "state_bytes": 36, "num_steps": 10}


class Story:
    """A policy, its state and its view; every call returns the actions that it decides."""

    def __init__(self, mesh: Mesh, **options) -> None:
        self.policy = Rejoin(**options)
        self.view = View(mesh=mesh, members=tuple(range(mesh.size)), facts=FACTS)
        self.state = self.policy.start(self.view)

    def tell(self, kind: str, **event):
        return self.policy.on(self.state, [Event(kind=kind, time_s=0.0, **event)], self.view)

    def vote(self, yes: bool = True, rank: int = -1):
        label = f"vote@{self.state.step + 1}.{self.state.epoch}"
        return self.tell("done", label=label, rank=rank, data={"yes": yes})


def ops(actions, name: str) -> list[Compute]:
    return [a for a in actions if isinstance(a, Compute) and a.op == name]


def exchanges(actions) -> list[tuple[int, tuple[int, ...]]]:
    return [(a.epoch, a.members) for a in actions if isinstance(a, Collective)]


def test_a_healthy_step_is_grad_exchange_vote_commit():
    story = Story(Mesh(replica=3))
    names = [a.operator for a in story.tell("start")]
    assert names == ["membership.form", "grad", "all_reduce", "vote"]
    assert [a.operator for a in story.vote()] == [
        *("update", "commit", "grad", "all_reduce", "vote")
    ]


def test_a_leave_redoes_the_step_in_a_new_epoch_with_the_contributors():
    story = Story(Mesh(replica=3))
    story.tell("start")
    story.vote()
    actions = story.tell("leave", rank=1)
    assert [a.item for a in ops(actions, "grad")] == [2]
    assert ops(actions, "grad")[0].ranks == (0, 2)
    assert exchanges(actions) == [(2, (0, 2))]
    commit = ops(story.vote(), "update")[0]
    assert (commit.item, commit.batch["num_contributors"]) == (2, 2)
    assert commit.batch["lr_factor"] == pytest.approx((2 / 3) ** 0.5)


def test_a_join_waits_for_the_start_of_a_step_and_contributes_zeros():
    story = Story(Mesh(replica=3))
    story.tell("start")
    story.tell("leave", rank=1)
    assert story.tell("join", rank=1) == []
    actions = story.vote()
    assert ops(actions, "update")[0].ranks == (0, 2)
    assert exchanges(actions) == [(3, (0, 1, 2))]
    assert ops(actions, "grad")[0].ranks == (0, 2)
    assert ops(actions, "grad.zero")[0].ranks == (1,)
    moves = [(type(a), a.ranks) for a in actions if isinstance(a, Move | Send | Recv)]
    assert moves == [(Move, (0,)), (Send, (0,)), (Recv, (1,))]
    of_joiner = next(a for a in ops(actions, "vote") if a.ranks == (1,))
    assert of_joiner.after == ("exchange@2.3", "state@2.3")
    actions = story.vote()
    assert [a.operator for a in actions][:2] == ["state.load", "update"]
    commit = ops(actions, "update")[0]
    assert commit.ranks == (0, 1, 2)
    assert commit.batch["num_contributors"] == 2, "zeros are no contribution"
    assert ops(actions, "grad")[0].ranks == (0, 1, 2)


def test_a_vote_against_redoes_the_step_in_a_new_epoch():
    story = Story(Mesh(replica=3))
    story.tell("start")
    actions = story.vote(yes=False)
    assert [a.item for a in ops(actions, "grad")] == [1]
    assert exchanges(actions) == [(2, (0, 1, 2))]


def test_votes_of_an_older_epoch_do_not_count():
    story = Story(Mesh(replica=3))
    story.tell("start")
    old = "vote@1.1"
    story.tell("leave", rank=2)
    assert story.tell("done", label=old) == []


def test_votes_told_rank_by_rank_commit_with_the_last():
    story = Story(Mesh(replica=3))
    story.tell("start")
    assert story.vote(rank=0) == [] == story.vote(rank=2)
    assert ops(story.vote(rank=1), "update")


def test_a_source_that_dies_is_replaced():
    story = Story(Mesh(replica=3))
    story.tell("start")
    story.tell("leave", rank=2)
    story.tell("join", rank=2)
    assert [a.ranks for a in story.vote() if isinstance(a, Send)] == [(0,)]
    assert [a.ranks for a in story.tell("leave", rank=0) if isinstance(a, Send)] == [(1,)]


def test_several_that_come_back_take_from_different_peers():
    story = Story(Mesh(replica=5))
    story.tell("start")
    for rank in (1, 2, 4):
        story.tell("leave", rank=rank)
    for rank in (4, 1, 2):
        story.tell("join", rank=rank)
    actions = story.vote()
    pairs = [(a.ranks, a.peer) for a in actions if isinstance(a, Send)]
    assert pairs == [((0,), 1), ((3,), 2), ((0,), 4)]
    of_rank_0 = [a.label for a in actions if 0 in a.ranks and a.label]
    assert len(of_rank_0) == len(set(of_rank_0)), "labels are unique within a rank"


def test_a_replica_of_several_ranks_leaves_as_a_whole():
    story = Story(Mesh(replica=3, shard=2))
    story.tell("start")
    actions = story.tell("leave", rank=2)
    assert exchanges(actions) == [(2, (0, 4)), (2, (1, 5))]
    assert story.tell("leave", rank=3) == []


def test_the_last_one_with_the_state_cannot_leave():
    story = Story(Mesh(replica=2))
    story.tell("start")
    story.tell("leave", rank=1)
    story.tell("join", rank=1)
    story.vote()
    with pytest.raises(WorldError, match="too few replicas have the state"):
        story.tell("leave", rank=0)


def test_a_leader_that_takes_over_starts_from_the_view():
    story = Story(Mesh(replica=3))
    story.view.members, story.view.epoch, story.view.step = (1, 2), 7, 4
    actions = story.tell("start", data={"behind": (2,)})
    assert exchanges(actions) == [(8, (1, 2))]
    assert [a.ranks for a in ops(actions, "grad")] == [(1,)]
    assert ops(actions, "grad")[0].item == 5


def test_nothing_follows_the_last_step():
    story = Story(Mesh(replica=2))
    story.tell("start")
    for _ in range(9):
        story.vote()
    assert [a.operator for a in story.vote()] == ["update", "commit"]
    assert story.tell("leave", rank=1) == []


def test_unknown_rule_names_the_known():
    with pytest.raises(PlanError, match="none, linear, sqrt"):
        Rejoin(lr_rule="cubic")


def test_effective_time_of_the_paper():
    """T = 18, d = 10, s = 3 minutes, R = 12: 44.4 % and 80.1 % (abstract: 44 %, 80 %)."""
    assert effective_frac_restart(18 * 60, 10 * 60) == pytest.approx(0.444, abs=5e-4)
    assert effective_frac_rejoin(18 * 60, 10 * 60, 3 * 60, 12) == pytest.approx(0.801, abs=5e-4)


@pytest.mark.parametrize(("num", "frac"), [(2, 0.639), (4, 0.736), (8, 0.785), (16, 0.809)])
def test_effective_time_of_other_replica_counts(num, frac):
    assert effective_frac_rejoin(18.0, 10.0, 3.0, num) == pytest.approx(frac, abs=5e-4)


def test_lr_factor_follows_the_contributors():
    sqrt_rule = [Rejoin().lr_factor(n, 12) for n in (12, 11, 12)]
    assert sqrt_rule == pytest.approx([1.0, 0.9574, 1.0], abs=5e-5)
    assert Rejoin(lr_rule="linear").lr_factor(9, 12) == 0.75
    assert Rejoin(lr_rule="none").lr_factor(1, 12) == 1.0
