"""Heartbeats, votes, epochs and decisions over a real store; members are objects of one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
from torch.distributed import TCPStore

from phalanx.errors import WorldError
from phalanx.membership import NOBODY, Ballot, Change, Member, Membership, Timeouts
from phalanx.worlds.membership_store import MembershipStore

TIMEOUTS = Timeouts(
    heartbeat_s=0.02, detect_s=1.5, exchange_s=4.0, island_s=6.0, init_s=8.0, quorum_s=10.0
)


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def join(store) -> Iterator[Callable[[int], MembershipStore]]:
    """Makes a member of three expected ones, with heartbeats until the test ends."""
    with ExitStack() as stack:

        def make(place: int) -> MembershipStore:
            member = stack.enter_context(
                closing(MembershipStore(store, place, (0, 1, 2), TIMEOUTS))
            )
            member.start()
            return member

        yield make


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "did not happen"
        time.sleep(0.01)


def all_alive(member: MembershipStore, count: int) -> bool:
    return len(member.roster.alive(member.poll())) == count


def form(leader: MembershipStore, others: list[MembershipStore], ids: tuple[int, ...]) -> None:
    """All say yes, the leader binds."""
    proposal = leader.roster.propose(ids, leader.poll())
    name = f"epoch/{proposal.epoch}"
    for member in (leader, *others):
        member.vote(name, True)
    assert leader.count_votes(name, leader.roster.ballot) is True
    assert leader.bind(proposal)
    leader.roster.commit(leader.now_s)
    for member in others:
        member.roster.adopt(member.committed())
    for member in (leader, *others):
        member.step = 0


def test_a_silent_member_is_a_leave_and_its_next_process_a_join(join):
    members = [join(place) for place in range(3)]
    wait_until(lambda: all_alive(members[0], 3))
    form(members[0], members[1:], (0, 1, 2))
    assert members[0].changes() == []
    members[1].close()
    found: list[Change] = []
    wait_until(lambda: bool(found.extend(members[0].changes()) or found))
    assert found == [Change("leave", Member(1, 1))]
    again = join(1)
    assert again.me == Member(1, 2)
    assert again.committed().ids == (0, 1, 2), "it learns that it is not the first"
    wait_until(lambda: bool(found.extend(members[0].changes()) or len(found) > 1))
    assert found[1] == Change("join", Member(1, 2))


def test_only_one_of_two_leaders_binds_and_decides(join):
    members = [join(place) for place in range(3)]
    wait_until(lambda: all_alive(members[0], 3) and all_alive(members[1], 3))
    proposals = [members[0], members[1]]
    for each in proposals:
        each.roster.propose((0, 1, 2), each.poll())
    assert members[0].committed() == NOBODY
    assert members[0].bind(members[0].roster.proposed)
    other = Membership(1, members[0].roster.proposed.members[:2])
    assert not members[1].bind(other)
    assert members[1].committed() == members[0].roster.proposed
    assert members[0].append(0, {"leader": members[0].me})
    assert not members[1].append(0, {"leader": members[1].me})
    assert members[1].decision(0) == {"leader": [0, 1]}
    assert members[2].decision(1) is None and members[2].num_decisions() == 1


def test_a_vote_cannot_be_taken_back_and_is_one_process_alone(join):
    first, leader = join(1), join(0)
    ballot = Ballot((leader.me, first.me), leader.now_s + 60.0)
    leader.vote("step", True)
    again = join(1)
    again.vote("step", True)
    assert leader.count_votes("step", ballot) is None, "the place's new process has no say"
    first.vote("step", False)
    first.vote("step", True)
    assert leader.count_votes("step", ballot) is False


def test_the_heir_leads_once_the_leader_is_silent(join):
    members = [join(place) for place in range(3)]
    wait_until(lambda: all_alive(members[0], 3))
    form(members[0], members[1:], (0, 1, 2))
    leader = members[0].me
    wait_until(lambda: members[1].poll() > 0 and members[1].roster.behind([leader]) == ())
    assert not members[1].inherits_from(leader, 0.0)
    members[0].close()

    def inherits(member: MembershipStore) -> bool:
        member.poll()
        return member.inherits_from(leader, 0.0)

    wait_until(lambda: inherits(members[1]))
    assert not inherits(members[2])


def test_who_does_not_listen_accuses_nobody(join):
    members = [join(place) for place in range(3)]
    wait_until(lambda: all_alive(members[0], 3))
    form(members[0], members[1:], (0, 1, 2))
    time.sleep(2 * TIMEOUTS.detect_s)  # this process or the store was busy
    assert members[0].changes() == []


def test_a_store_that_is_gone_ends_the_member():
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    member = MembershipStore(host, 0, (0, 1), TIMEOUTS)
    member.start()
    del host

    def ended() -> bool:
        try:
            member.poll()
        except WorldError as error:
            return error.code == "world/dead"
        return False

    wait_until(ended)
